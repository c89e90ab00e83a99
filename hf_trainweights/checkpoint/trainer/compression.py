"""The work on one checkpoint of a Trainer, which reads files and never live tensors, and what it saved."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_trainweights.checkpoint.encoded.anchor_files import ANCHOR_SUFFIX
from hf_trainweights.checkpoint.manifest.manifest import MANIFEST_NAME, Manifest
from hf_trainweights.checkpoint.rewriting import compress_directory
from hf_trainweights.checkpoint.run.completeness import missing_problem, plain_problem
from hf_trainweights.checkpoint.run.verification import verify_checkpoint
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.weight_files import safetensors_files


@dataclass(frozen=True)
class Compression:
    """One checkpoint that is to be made small.

    Args:
        directory: The checkpoint.
        plain_bytes: What it takes on disk before.
        options: Arguments for `compress_directory`.
    """

    directory: Path
    plain_bytes: int
    options: dict[str, Any]

    @property
    def is_wanted(self) -> bool:
        """Whether it is still there to be made small."""
        return is_plain(self.directory)

    def run(self, savings: Savings) -> str | None:
        """Make the checkpoint small and count it; return why there is no room to rewrite it, or None.

        CorruptFileError: a file of it is damaged, and nothing has changed. TrainWeightsError: every file in it is
        whole.
        """
        problem = missing_problem(self.directory) if is_plain(self.directory) else None
        if problem:
            raise _not_whole(self.directory, problem)
        no_room = not_enough_space(_rewriting_bytes(self.directory), shutil.disk_usage(self.directory).free)
        if no_room:
            return no_room
        manifest = compress_directory(self.directory, **self.options)
        savings.add(self.plain_bytes, size_bytes(self.directory), manifest)
        return None


@dataclass
class Savings:
    """How much smaller the checkpoints of a run became, and by how much its weights are off; a line as text."""

    checkpoints: int = 0
    before_bytes: int = 0
    after_bytes: int = 0
    largest_weight_error: float = 0.0

    def add(self, before_bytes: int, after_bytes: int, manifest: Manifest) -> None:
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


def require_whole(directory: Path) -> None:
    """Check a plain checkpoint: what is encoded counts as verified, so damage must be found before."""
    problem = plain_problem(directory)
    if problem:
        raise _not_whole(directory, problem)


def _not_whole(directory: Path, problem: str) -> CorruptFileError:
    next_step = "The other checkpoints do not need this one; remove it, or restore the file from a copy."
    return CorruptFileError(str(directory), "a whole checkpoint", problem, next_step)


def not_enough_space(needed_bytes: int, free_bytes: int) -> str | None:
    """Say why a checkpoint cannot be rewritten on a full disk, or return None."""
    if free_bytes >= needed_bytes:
        return None
    return f"rewriting it takes {needed_bytes // 10**6} MB of free disk space, there are {free_bytes // 10**6} MB"


def size_bytes(directory: Path) -> int:
    """Return what a checkpoint takes on disk, without anchors that other checkpoints hold as well."""
    files = ((file, file.stat()) for file in directory.rglob("*") if file.is_file())
    # Other links are to files of this checkpoint. An anchor with one link is a copy: the disk has no hard links.
    own = (status for file, status in files if file.suffix != ANCHOR_SUFFIX or status.st_nlink == 1)
    return sum({(status.st_dev, status.st_ino): status.st_size for status in own}.values())


def _rewriting_bytes(directory: Path) -> int:
    """Return the free space that rewriting takes: one encoded file at a time beside the plain ones."""
    sizes = [file.stat().st_size for file in directory.iterdir() if file.is_file()]
    # Shards become one file.
    shards = sum(file.stat().st_size for file in safetensors_files(directory))
    return max([shards, *sizes])


def drop_stale_manifest(directory: Path) -> None:
    """Remove the manifest of an earlier run whose checkpoint of this step the Trainer has just written over."""
    manifest = directory / MANIFEST_NAME
    if manifest.exists() and not verify_checkpoint(directory).intact:
        manifest.unlink()
