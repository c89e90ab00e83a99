"""The one way to write files into a directory that may hold a model already: aside, then all of them into place.

What a writer that died left there is removed, and what its save took away is put back.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hf_trainweights.errors import SaveError
from hf_trainweights.files import disk
from hf_trainweights.files.atomic import make_directories, remove_tree, save_errors, sync_tree
from hf_trainweights.files.disk import TEMPORARY_PREFIX, claim_directory, lock_directory, take_over
from hf_trainweights.files.swap import JOURNAL, NEW, swap_in, undo_interrupted

_logger = logging.getLogger(__name__)


@dataclass
class StagedFiles:
    """Files on their way into a directory.

    Args:
        path: An empty directory to write them into, on the same file system.
        names: Once they are in place their names, relative to that directory.
    """

    path: Path
    names: list[str] = field(default_factory=list)


@contextlib.contextmanager
def staged_files(directory: Path, is_replaced: Callable[[str], bool]) -> Iterator[StagedFiles]:
    """Yield an empty directory; when the block ends without an error, what it holds is in `directory`, all or nothing.

    A loader finds the old files, the new ones, or no model at all, at every moment, whatever stops the process. If a
    new file is of the kind that `is_replaced` tells, such as weight files, all older files of that kind go.
    """
    with save_errors(directory, "Nothing was changed there."):
        make_directories(directory)
        with lock_directory(directory) as is_free:
            if not is_free:
                raise SaveError(
                    str(directory),
                    "one save at a time",
                    "another save into it running",
                    "Wait, or use another directory.",
                )
            remove_abandoned(directory)
            claim = claim_directory(directory)
            try:
                staged = StagedFiles(claim.path / NEW)
                disk.file_system.mkdir(staged.path)
                yield staged
                sync_tree(claim.path)
                staged.names = swap_in(claim.path, directory, is_replaced)
            finally:
                # With a journal the old files are in there: the disk refused to take them back.
                if not (claim.path / JOURNAL).exists():
                    remove_tree(claim.path, ignore_errors=True)
                claim.release()


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
