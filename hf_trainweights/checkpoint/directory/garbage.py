"""Removal of whole checkpoints, of leftovers of interrupted saves, and of anchors that no file needs."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from hf_trainweights.checkpoint.directory.layout import Layout, layout_of
from hf_trainweights.checkpoint.encoded.structure import ANCHOR_SUFFIX
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME
from hf_trainweights.checkpoint.run.anchors import unused_anchors
from hf_trainweights.checkpoint.run.checkpoints import checkpoint_directories
from hf_trainweights.checkpoint.run.verification import require_undamaged, verify_checkpoint
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files import disk
from hf_trainweights.files.atomic import remove_tree
from hf_trainweights.files.disk import lock_directory, move_aside
from hf_trainweights.files.staging import remove_abandoned


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint directory: it is gone in one step, its files follow; others keep their links to anchors."""
    claim = move_aside(path)
    try:
        remove_tree(claim.path)
    finally:
        claim.release()


def collect_garbage(root: str | Path, *, dry_run: bool = False) -> list[Path]:
    """Remove the leftovers of interrupted saves in a run: temporary files, and anchors that no file refers to.

    Where any checkpoint of the run has a file that is damaged, or that cannot be read, all anchors stay, because that
    file may need any of them once it is repaired. A warning names it.

    Args:
        root: Where the run keeps its `checkpoint-<step>` directories, or one of these.
        dry_run: Only say what would be removed.

    Returns:
        Paths that were removed, sorted. Files that a living process writes stay.

    Raises:
        OSError: Something cannot be read or removed.

    Examples:
        >>> import tempfile
        >>> collect_garbage(tempfile.mkdtemp())
        []
    """
    root = Path(root)
    removed: list[Path] = []
    checkpoints = checkpoint_directories(root)
    damage = functools.cache(lambda: _damage(checkpoints or [root]))
    for checkpoint in (root, *checkpoints):
        with contextlib.suppress(FileNotFoundError):  # another process removes the checkpoint
            layout = layout_of(checkpoint)
            for directory in layout.directories:
                removed += _collect(layout, directory, damage, dry_run=dry_run)
    return sorted(removed)


def _collect(layout: Layout, directory: Path, damage: Callable[[], str | None], *, dry_run: bool) -> list[Path]:
    """Remove what is left over in one directory, unless someone writes in it."""
    if not directory.is_dir():
        return []
    with lock_directory(directory) as is_free:
        if not is_free:
            return []
        unused = layout.unlisted(directory)
        if any(path.suffix == ANCHOR_SUFFIX for path in unused) and damage():
            unused = [path for path in unused if path.suffix != ANCHOR_SUFFIX]
        for path in () if dry_run else unused:
            disk.file_system.unlink(path)
        return [*unused, *remove_abandoned(directory, dry_run=dry_run)]


def _damage(checkpoints: Sequence[Path]) -> str | None:
    """Say, also in a warning, which checkpoint of a run cannot be read whole; None if all can."""
    for directory in checkpoints:
        problem = _problem(directory)
        if problem and directory.is_dir():  # otherwise another process has removed it
            warnings.warn(
                f"All anchors stay, because a damaged file may need them: {directory}: {problem}", stacklevel=4
            )
            return problem
    return None


def _problem(directory: Path) -> str | None:
    """Say which file of a checkpoint is damaged or cannot be read, or return None."""
    try:
        if (directory / MANIFEST_NAME).exists():
            problems = verify_checkpoint(directory).problems
            return "; ".join(f"{name} {what}" for name, what in problems.items()) or None
        require_undamaged(directory, [anchor.name for anchor in unused_anchors(directory)])
    except (CorruptFileError, OSError) as error:
        return str(error)
    return None
