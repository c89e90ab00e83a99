"""The work on one checkpoint of a Trainer, which reads files and never live tensors, and what it saved."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from hf_trainweights.checkpoint.directory.layout import layout_of
from hf_trainweights.checkpoint.directory.rewriting import compress
from hf_trainweights.checkpoint.manifest.manifest import MANIFEST_NAME, Manifest
from hf_trainweights.checkpoint.run.job import Choices, SaveJob
from hf_trainweights.checkpoint.run.verification import progress_problem, size_bytes, verify_checkpoint
from hf_trainweights.errors import CorruptFileError


@dataclass(frozen=True)
class Compression:
    """One checkpoint that is to be made small, of a sharded one by all ranks, each of which has one of these.

    Args:
        job: The checkpoint, and how it is saved.
        choices: What it shall keep, and what is known of it.
    """

    job: SaveJob
    choices: Choices

    @property
    def directory(self) -> Path:
        """The checkpoint."""
        return self.job.path

    def run(self, savings: Savings) -> str | None:
        """Make the checkpoint small and count it; return on every rank why there is no room, or None.

        CorruptFileError: a file of it is damaged, and nothing has changed. TrainWeightsError: every file in it is
        whole.
        """
        return self.job.ranks.decide(lambda: self._compress(savings))

    def _compress(self, savings: Savings) -> str | None:
        if not self.directory.is_dir():
            return None
        drop_stale_manifest(self.directory)
        layout, plain_bytes = layout_of(self.directory), size_bytes(self.directory)
        if is_plain(self.directory):
            problem = progress_problem(self.directory) or layout.missing_problem()
            if problem:
                next_step = "The other checkpoints do not need this one; remove it, or restore the file from a copy."
                raise CorruptFileError(str(self.directory), "a whole checkpoint", problem, next_step)
        needed, free = layout.rewriting_bytes(), shutil.disk_usage(self.directory).free
        if free < needed:
            return f"rewriting it takes {needed // 10**6} MB of free disk space, there are {free // 10**6} MB"
        savings.add(plain_bytes, compress(self.job, self.choices), size_bytes(self.directory))
        return None


@dataclass
class Savings:
    """How much smaller the checkpoints of a run became, and by how much its weights are off; a line as text."""

    checkpoints: int = 0
    before_bytes: int = 0
    after_bytes: int = 0
    largest_weight_error: float = 0.0

    def add(self, before_bytes: int, manifest: Manifest, after_bytes: int) -> None:
        """Count a checkpoint, given what it took on the disk before and takes now."""
        # A checkpoint that was small already, after a push or a resume, shows no difference and counts once.
        if before_bytes == after_bytes:
            return
        self.checkpoints += 1
        self.before_bytes += before_bytes
        self.after_bytes += after_bytes
        tensors = [tensor for entry in manifest.files.values() for tensor in entry.report.get("tensors", ())]
        bounds = [tensor["bound"] or 0.0 for tensor in tensors if tensor["role"] == "weight"]
        self.largest_weight_error = max([self.largest_weight_error, *bounds])

    def __str__(self) -> str:
        ratio = self.before_bytes / max(1, self.after_bytes)
        error = (
            f"weights off by at most {self.largest_weight_error:.3g}" if self.largest_weight_error else "weights exact"
        )
        sizes = f"{self.before_bytes / 1e6:.1f} MB -> {self.after_bytes / 1e6:.1f} MB ({ratio:.2f}x)"
        return f"{self.checkpoints} checkpoints made small: {sizes}, {error}"


def is_plain(directory: Path) -> bool:
    """Return whether a checkpoint is there, and as the Trainer wrote it."""
    return directory.is_dir() and not (directory / MANIFEST_NAME).exists()


def drop_stale_manifest(directory: Path) -> None:
    """Remove the manifest of an earlier run whose checkpoint of this step the Trainer has just written over."""
    manifest = directory / MANIFEST_NAME
    if manifest.exists() and not verify_checkpoint(directory).intact:
        manifest.unlink()
