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
    """Remove temporary files and directories right in a directory whose writers no longer live; return them, sorted.

    While a save into the directory runs nothing is removed: that one cleans up itself.
    """
    if not directory.is_dir():
        return []
    with lock_directory(directory) as is_free:
        return remove_abandoned(directory, dry_run=dry_run) if is_free else []


def remove_abandoned(directory: Path, *, dry_run: bool = False) -> list[Path]:
    """Do what `clean_up` does, in a directory that the caller has locked."""
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
        return not path.exists()
