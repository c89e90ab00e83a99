"""The work on one checkpoint of a Trainer: a call in the background that reads files and never live tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from hf_trainweights.checkpoint.directory.manifest import MANIFEST_NAME, Manifest
from hf_trainweights.checkpoint.directory.rewriter import compress_directory
from hf_trainweights.checkpoint.directory.verification import verify_checkpoint
from hf_trainweights.checkpoint.directory.weights_aside import adopt_weights
from hf_trainweights.files.temporary import Claim
from hf_trainweights.files.weight_files import safetensors_files


@dataclass(frozen=True)
class Compression:
    """One checkpoint that is to be made small.

    Args:
        directory: The checkpoint.
        plain_bytes: What it takes on disk before.
        aside: Weights that take the place of its own first, from `set_weights_aside`; None where its own serve.
        options: Arguments for `compress_directory`.
    """

    directory: Path
    plain_bytes: int
    aside: Claim | None
    options: dict[str, Any]

    def run(self, savings: Savings) -> None:
        """Make the checkpoint small.

        Args:
            savings: Where it is counted.

        Raises:
            TrainWeightsError: It could not be rewritten; every file in it is whole.
        """
        if self.aside is not None:
            adopt_weights(self.directory, self.aside)
        manifest = compress_directory(self.directory, **self.options)
        savings.add(self.plain_bytes, size_bytes(self.directory), manifest)


class BackgroundCall:
    """One call in a thread of its own, whose exception is raised by `result`.

    Args:
        function: What to call.
    """

    def __init__(self, function: Callable[[], None]):
        self._function = function
        self._error: BaseException | None = None
        # Not a daemon: the interpreter waits for a checkpoint that is being written.
        self._thread = threading.Thread(target=self.run, name="trainweights-checkpoint", daemon=False)

    def start(self) -> None:
        """Call the function in the thread."""
        self._thread.start()

    def run(self) -> None:
        """Call the function here and now."""
        try:
            self._function()
        except BaseException as error:  # raised again by result, in the thread that asks
            self._error = error

    def result(self) -> None:
        """Wait for the call to end.

        Raises:
            BaseException: Whatever the function raised.
        """
        if self._thread.ident is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error


@dataclass
class Savings:
    """How much smaller the checkpoints of a run became, and by how much its weights are off; a line as text."""

    checkpoints: int = 0
    before_bytes: int = 0
    after_bytes: int = 0
    largest_weight_error: float = 0.0

    def add(self, before_bytes: int, after_bytes: int, manifest: Manifest) -> None:
        """Count a checkpoint.

        Args:
            before_bytes: What it took on disk before.
            after_bytes: What it takes now.
            manifest: What it holds now.
        """
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


def size_bytes(directory: Path) -> int:
    """Return what a checkpoint takes on disk, without anchors."""
    # An anchor is a second link to a file that another checkpoint holds.
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file() and file.suffix != ".anchor")


def rewriting_bytes(directory: Path) -> int:
    """Return the free space that rewriting takes: one encoded file at a time, and its payload until it is written."""
    sizes = [file.stat().st_size for file in directory.iterdir() if file.is_file()]
    # Shards become one file; where they do not have the modules' names, they are set aside as one file as well.
    shards = sum(file.stat().st_size for file in safetensors_files(directory))
    return 2 * max([shards, *sizes])


def stored_weight_names(directory: Path) -> set[str] | None:
    """Return the names in a directory's model*.safetensors files, None if there are none."""
    files = safetensors_files(directory)
    names: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as shard:
            names |= set(shard.keys())
    return names if files else None


def drop_stale_manifest(directory: Path) -> None:
    """Remove the manifest of an earlier run whose checkpoint of this step the Trainer has just written over."""
    manifest = directory / MANIFEST_NAME
    if manifest.exists() and not verify_checkpoint(directory).intact:
        manifest.unlink()
