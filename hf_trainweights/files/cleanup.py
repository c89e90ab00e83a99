"""What dead writers left in a directory: removed, and what an interrupted save took away put back."""

from __future__ import annotations

import logging
from pathlib import Path

from hf_trainweights.files import disk
from hf_trainweights.files.atomic import remove_tree
from hf_trainweights.files.swap import undo_interrupted
from hf_trainweights.files.temporary import TEMPORARY_PREFIX, lock_directory, take_over

_logger = logging.getLogger(__name__)


def clean_up(directory: Path, *, dry_run: bool = False) -> list[Path]:
    """Remove the temporary files and directories whose writers no longer live.

    Args:
        directory: It is looked in directly, not below.
        dry_run: Only say what would be removed.

    Returns:
        What was removed, sorted. Nothing while a save into the directory runs: that one cleans up itself.

    Raises:
        OSError: The directory cannot be read, or something in it not be removed.
    """
    if not directory.is_dir():
        return []
    with lock_directory(directory) as is_free:
        return remove_abandoned(directory, dry_run=dry_run) if is_free else []


def remove_abandoned(directory: Path, *, dry_run: bool = False) -> list[Path]:
    """Do what `clean_up` does, in a directory that the caller has locked.

    Args:
        directory: Likewise.
        dry_run: Likewise.

    Returns:
        What was removed, sorted.

    Raises:
        OSError: Likewise.
    """
    return [path for path in sorted(directory.glob(f"{TEMPORARY_PREFIX}*")) if _remove_if_abandoned(path, dry_run)]


def _remove_if_abandoned(path: Path, dry_run: bool) -> bool:
    with take_over(path) as is_abandoned:
        if not is_abandoned or dry_run:
            return is_abandoned
        if path.is_symlink() or not path.is_dir():
            disk.file_system.unlink(path)
            return True
        try:
            undo_interrupted(path, path.parent)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            _logger.warning(
                "%s stays: it may hold what a save replaced, but its journal cannot be read: %s", path, error
            )
            return False
        remove_tree(path)
        return True
