"""Finds the newest checkpoint that is whole: `latest(root)`, for a resume that does not fall over a broken one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_trainweights.checkpoint.directory.layout import plain_problem, register_checkpoint
from hf_trainweights.checkpoint.encoded.base_weights import find_base
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME, Manifest
from hf_trainweights.checkpoint.run.checkpoints import (
    checkpoint_directories,
    checkpoint_step,
    converted_weights_problem,
)
from hf_trainweights.checkpoint.run.ranks import Ranks, all_ranks
from hf_trainweights.checkpoint.run.verification import verify_checkpoint


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint directory and whether it can be used.

    Args:
        path: The directory.
        step: The number in its name.
        manifest: Its manifest; None for a plain directory or a damaged manifest.
        problem: Why it cannot be used, or None.
    """

    path: Path
    step: int
    manifest: Manifest | None
    problem: str | None

    @property
    def verified(self) -> bool:
        """Whether every file was compared with a digest; a plain directory is only checked for completeness."""
        return self.manifest is not None and self.problem is None


def find_checkpoints(root: str | Path) -> Iterator[FoundCheckpoint]:
    """Check the checkpoints in `root` one after the other, newest first; each is read when it is asked for.

    Args:
        root: Where a run keeps its checkpoints.

    Yields:
        One entry per `checkpoint-<step>` directory.

    Raises:
        OSError: `root` cannot be read.
    """
    for path in checkpoint_directories(root):
        yield check_checkpoint(path)


def check_checkpoint(path: Path) -> FoundCheckpoint:
    """Check a directory called `checkpoint-<step>`: against its manifest, or for completeness where it has none."""
    step = checkpoint_step(path)
    try:
        if not (path / MANIFEST_NAME).exists():
            return FoundCheckpoint(path, step, None, plain_problem(path) or converted_weights_problem(path))
        report = verify_checkpoint(path)
        problem = "; ".join(f"{name} {what}" for name, what in report.problems.items()) if not report.intact else None
        return FoundCheckpoint(path, step, report.manifest, problem or converted_weights_problem(path))
    except OSError as error:
        return FoundCheckpoint(path, step, None, f"cannot be read: {error}")


def latest(root: str | Path) -> str | None:
    """Return the newest checkpoint that is whole.

    That is one whose manifest verifies, or a directory without a manifest, a Trainer's own for example, that has a
    `trainer_state.json` (or `trainweights_state.pt`), weights that open and, if there is an `optimizer.pt`, a readable
    one. Such a plain directory has no digests, so it counts as unverified; `find_checkpoints` tells the two apart. A
    directory from which a Trainer would resume with weights at their starting values is passed over as well.

    Args:
        root: Where a run keeps its `checkpoint-<step>` directories; it may be missing.

    Returns:
        The path, for `Trainer.train(resume_from_checkpoint=...)` or `load_checkpoint`; None if there is none. Each
        newer directory that was passed over is reported as a warning with the reason.

    Raises:
        MissingAnchorError: None is whole, and the base that one of them needs is gone: a run that began anew would
            write over it.
        CorruptFileError: Likewise, and the base has changed.
        OSError: `root` cannot be read.

    Examples:
        >>> import tempfile
        >>> latest(tempfile.mkdtemp()) is None
        True
    """
    passed_over = []
    for found in find_checkpoints(root):
        if found.problem is None:
            register_checkpoint(found.path)
            return str(found.path)
        warnings.warn(f"{found.path} is passed over: {found.problem}", stacklevel=2)
        passed_over.append(found)
    for found in passed_over:
        if found.manifest is not None and found.manifest.base is not None:
            find_base(found.manifest.base, found.path.absolute())
    return None


def latest_on_all_ranks(root: str | Path, group: Any = None) -> str | None:
    """Return what `latest` finds, on every rank the same; every rank of the group calls it.

    The first rank reads and verifies the checkpoints, so their bytes are read once and not once by each rank.

    Args:
        root: Where a run keeps its `checkpoint-<step>` directories; it may be missing.
        group: The process group. Default: all ranks. Without a process group this is `latest`.

    Returns:
        The path, or None if there is none.

    Raises:
        OSError: `root` cannot be read by the first rank; on every rank.

    Examples:
        >>> import tempfile
        >>> latest_on_all_ranks(tempfile.mkdtemp()) is None
        True
    """
    found = (Ranks(group) if group else all_ranks()).decide(lambda: latest(root))
    if found is not None:
        register_checkpoint(Path(found))
    return found
