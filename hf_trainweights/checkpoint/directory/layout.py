"""The two layouts of a checkpoint on the disk behind one interface: here alone is asked which one it is."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from hf_trainweights.checkpoint.dcp.contents import dcp_directories
from hf_trainweights.checkpoint.encoded.anchor_files import register_anchor_directory
from hf_trainweights.checkpoint.manifest.manifest import Manifest
from hf_trainweights.checkpoint.run.job import Choices, SaveJob
from hf_trainweights.checkpoint.run.verification import progress_problem
from hf_trainweights.checkpoint.sharded.rewriting import ShardedLayout
from hf_trainweights.checkpoint.whole.rewriting import WholeLayout


class Layout(Protocol):
    """How a checkpoint lies on the disk: in whole files, or sharded."""

    path: Path
    directories: list[Path]
    """Where its files and anchors lie: the checkpoint itself, then directories in it."""

    def missing_problem(self) -> str | None:
        """Say which part a resume would not find, or return None."""
        ...

    def problem(self) -> str | None:
        """Say why its files cannot be loaded, as far as a look at them without digests shows, or return None."""
        ...

    def unlisted(self, directory: Path) -> list[Path]:
        """List what interrupted saves have left in one of its directories, and anchors that nothing needs."""
        ...

    def rewriting_bytes(self) -> int:
        """Return the free space on the disk that making it small takes."""
        ...

    def compress(self, job: SaveJob, choices: Choices) -> Manifest:
        """Make it small where it lies; after an error every file is whole, old or new."""
        ...

    def restore(self) -> Manifest:
        """Make it plain where it lies; after an error every file is whole, small or plain."""
        ...


def layout_of(path: Path) -> Layout:
    """Return the layout of a checkpoint; of a directory that holds none, that of whole files."""
    parts = dcp_directories(path)
    return ShardedLayout(path, parts) if parts else WholeLayout(path)


def plain_problem(path: Path) -> str | None:
    """Say why a checkpoint without a manifest cannot be used; None if all that a resume needs can be read."""
    return progress_problem(path) or layout_of(path).problem()


def register_checkpoint(path: Path) -> None:
    """Look for anchors in a checkpoint, wherever it was when it was written."""
    for directory in layout_of(path).directories:
        register_anchor_directory(directory)
