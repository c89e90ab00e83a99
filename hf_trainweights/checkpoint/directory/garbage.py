"""Removal of whole checkpoints, of leftovers of interrupted saves, and of anchors that no file needs."""

from __future__ import annotations

import contextlib
from pathlib import Path

from hf_trainweights.checkpoint.directory.discovery import checkpoint_directories
from hf_trainweights.checkpoint.encoded.anchor_files import anchor_file_name
from hf_trainweights.checkpoint.encoded.reader import is_encoded, read_structure
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files import disk
from hf_trainweights.files.atomic import remove_tree
from hf_trainweights.files.cleanup import remove_abandoned
from hf_trainweights.files.temporary import lock_directory, move_aside


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint directory: it is gone in one step, its files follow.

    Args:
        path: The directory. Other checkpoints keep their own links to anchors it holds.

    Raises:
        OSError: The disk refuses.
    """
    claim = move_aside(path)
    try:
        remove_tree(claim.path)
    finally:
        claim.release()


def collect_garbage(root: str | Path, *, dry_run: bool = False) -> list[Path]:
    """Remove the leftovers of interrupted saves in a run: temporary files, and anchors that no file refers to.

    Args:
        root: Where the run keeps its `checkpoint-<step>` directories, or one of these.
        dry_run: Only say what would be removed.

    Returns:
        Paths that were removed, sorted. Files that a living process writes stay.

    Raises:
        OSError: Something cannot be read or removed.

    Example:
        >>> import tempfile
        >>> collect_garbage(tempfile.mkdtemp())
        []
    """
    root = Path(root)
    removed: list[Path] = []
    for directory in (root, *checkpoint_directories(root)):
        with contextlib.suppress(FileNotFoundError):  # another process removes the checkpoint
            removed += _collect(directory, dry_run=dry_run)
    return sorted(removed)


def _collect(directory: Path, *, dry_run: bool) -> list[Path]:
    """Remove what is left over in one directory, unless someone writes in it."""
    if not directory.is_dir():
        return []
    with lock_directory(directory) as is_free:
        if not is_free:
            return []
        anchors = unused_anchors(directory)
        for path in () if dry_run else anchors:
            disk.file_system.unlink(path)
        return [*anchors, *remove_abandoned(directory, dry_run=dry_run)]


def unused_anchors(directory: Path) -> list[Path]:
    """List anchors that no encoded file beside them refers to.

    Args:
        directory: A checkpoint directory.

    Returns:
        Their paths; none where the reference of an encoded file cannot be read, as in one of a newer version.

    Raises:
        OSError: The directory cannot be read.
    """
    anchors = set(directory.glob(anchor_file_name("*")))
    if not anchors:
        return []
    for path in directory.iterdir():
        if path not in anchors and path.is_file() and is_encoded(path):
            try:
                sha256 = read_structure(path).get("anchor", {}).get("sha256", "")
            except CorruptFileError:
                return []
            anchors.discard(directory / anchor_file_name(sha256))
    return sorted(anchors)
