"""Finds the newest checkpoint that is whole: `latest(root)`, for a resume that does not fall over a broken one."""

from __future__ import annotations

import contextlib
import re
import stat
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_trainweights.checkpoint.dcp.contents import register_checkpoint
from hf_trainweights.checkpoint.encoded.base_files import find_base
from hf_trainweights.checkpoint.manifest.manifest import MANIFEST_NAME, Manifest
from hf_trainweights.checkpoint.run.completeness import plain_problem
from hf_trainweights.checkpoint.run.converted_weights import converted_weights_problem
from hf_trainweights.checkpoint.run.verification import verify_checkpoint

_CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")


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


def checkpoint_directories(root: str | Path) -> list[Path]:
    """List the `checkpoint-<step>` directories in `root`, newest first: by step, then by modification time.

    Links are left out; without `root` there are none.
    """
    root = Path(root)
    if not root.is_dir():
        return []
    found = []
    for path in root.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process removes it
            status = path.lstat()
            if _CHECKPOINT_NAME.fullmatch(path.name) and stat.S_ISDIR(status.st_mode):
                found.append((checkpoint_step(path), status.st_mtime_ns, path))
    return [path for *_, path in sorted(found, reverse=True)]


def checkpoint_step(path: Path) -> int:
    """Return the step in the name of a checkpoint directory; ValueError: it has another name."""
    match = _CHECKPOINT_NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is not called checkpoint-<step>")
    return int(match[1])


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
