"""Staged writes: the one way to write files into a directory that may hold a model already.

A save writes its files into a staging directory. Then it moves all of them to their final names. So a loader finds the
old model, the new one, or an error. The next save removes the files of a writer that died, and puts back the old files
that it had moved away.

An entry point is a file that loaders open first: an index of shards, or a single file of weights. If only weights
change, a loader never meets an error. New shards have new names, so they arrive before the entry point that names them,
and old shards leave after it. But one rename changes one file. So if config.json changes too, the old entry points
leave before any other file moves, and the new ones arrive last: a loader may find no model, but never parts of two.

Old files that leave stay in the staging directory, beside a journal, until all new files have arrived. After an error
they are put back at once, and after a kill or a power failure `_undo_interrupted` puts them back.

    <directory>/_trainweights-<random>/new/          the new files that have not arrived yet
    <directory>/_trainweights-<random>/old/          the old files that have left
    <directory>/_trainweights-<random>/journal.json  {"come": [names], "go": [names]}, as long as this can be undone
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import json
import logging
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hf_trainweights.errors import SaveError
from hf_trainweights.files import disk
from hf_trainweights.files.atomic import (
    keep_permissions,
    link_or_copy,
    make_directories,
    remove_files,
    remove_tree,
    replace_file,
    save_errors,
    sync_tree,
)
from hf_trainweights.files.disk import TEMPORARY_PREFIX, claim_directory, lock_directory, take_over
from hf_trainweights.files.reading import is_safe_name
from hf_trainweights.files.weight_files import entry_point_rank, is_read_by_loaders, is_shard

_NEW, _OLD, _JOURNAL = "new", "old", "journal.json"
_MAX_JOURNAL_BYTES = 1 << 24

_logger = logging.getLogger(__name__)


@dataclass
class StagedFiles:
    """The files of a staged write.

    Args:
        path: The empty directory that the caller writes the files into, on the same file system as their target.
        names: The names of the files relative to the target directory, once they are there.
    """

    path: Path
    names: list[str] = field(default_factory=list)


@contextlib.contextmanager
def staged_files(directory: Path, is_replaced: Callable[[str], bool]) -> Iterator[StagedFiles]:
    """Yield an empty directory; when the block ends without an error, all its files move into `directory`, or none.

    At every moment a loader finds the old files, the new ones, or no model at all, whatever stops the process.
    If `is_replaced` is true for the name of a new file, all old files leave for whose names it is true: new weight
    files replace all old ones, of whatever names.
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
                staged = StagedFiles(claim.path / _NEW)
                disk.file_system.mkdir(staged.path)
                _hide_from_those_who_may_not_read(staged.path, directory)
                yield staged
                _keep_permissions(staged.path, directory, is_replaced)
                sync_tree(claim.path)
                staged.names = _swap_in(claim.path, directory, is_replaced)
            finally:
                # A journal is left only if moving the old files back failed: then they are still in here.
                if not (claim.path / _JOURNAL).exists():
                    remove_tree(claim.path, ignore_errors=True)
                claim.release()


def _hide_from_those_who_may_not_read(new: Path, directory: Path) -> None:
    """Close the directory of new files to the group, or to others, if these may not read some file of `directory`."""
    mode = open_to = stat.S_IMODE(new.stat().st_mode)
    for path in filter(Path.is_file, directory.iterdir()):
        readable = path.stat().st_mode
        if not readable & stat.S_IRGRP:
            mode &= ~stat.S_IRWXG
        if not readable & stat.S_IROTH:
            mode &= ~stat.S_IRWXO
    if mode != open_to:
        disk.file_system.chmod(new, mode)


def _keep_permissions(new: Path, directory: Path, is_replaced: Callable[[str], bool]) -> None:
    """Give a new file the permissions of the old file of its name, or those that all old files of its kind grant."""
    earlier = [path for path in directory.iterdir() if path.is_file() and is_replaced(path.name)]
    for file in filter(Path.is_file, new.rglob("*")):
        name = file.relative_to(new).as_posix()
        keep_permissions(file, directory / name, earlier if is_replaced(name) else ())


def clean_up(directory: Path, *, dry_run: bool = False) -> list[Path]:
    """Remove the temporary files and directories in a directory whose writers are dead; return their paths, sorted.

    While a save into the directory runs, this removes no file, because that save cleans up itself.
    """
    if not directory.is_dir():
        return []
    with lock_directory(directory) as is_free:
        return remove_abandoned(directory, dry_run=dry_run) if is_free else []


def remove_abandoned(directory: Path, *, dry_run: bool = False) -> list[Path]:
    """Clean up as `clean_up` does, in a directory that the caller has locked."""
    return [path for path in sorted(directory.glob(f"{TEMPORARY_PREFIX}*")) if _remove_if_abandoned(path, dry_run)]


def _remove_if_abandoned(path: Path, dry_run: bool) -> bool:
    with take_over(path) as is_abandoned:
        if not is_abandoned or dry_run:
            return is_abandoned
        if path.is_symlink() or not path.is_dir():
            disk.file_system.unlink(path)
            return True
        try:
            _undo_interrupted(path, path.parent)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            stays = "stays: it may hold what a save replaced, but its journal cannot be read"
            _logger.warning("%s %s: %s", path, stays, error)
            return False
        remove_tree(path)
        return not path.exists()


def _swap_in(staging: Path, directory: Path, is_replaced: Callable[[str], bool]) -> list[str]:
    """Move all files of `staging/new` into `directory`, or none, and return their names, sorted.

    The data of all files is on the disk already. `staged_files` describes `is_replaced`.
    """
    names = sorted(
        path.relative_to(staging / _NEW).as_posix() for path in (staging / _NEW).rglob("*") if path.is_file()
    )
    for name in names:
        if (directory / name).is_dir():
            raise IsADirectoryError(errno.EISDIR, "a directory has the name of a file to be written", name)
    # Equal files need not move. Entry points do, even an index of equal shapes, because no loader begins without one.
    arriving = [name for name in names if entry_point_rank(name) is not None or not _is_same(staging, directory, name)]
    leaving = [name for name in arriving if (directory / name).exists()]
    present = sorted(path.name for path in directory.iterdir() if path.is_file())
    if any(is_replaced(name) for name in names):
        leaving += [name for name in present if is_replaced(name) and name not in names]
    try:
        _make_room(staging, directory, arriving, leaving)
        if _is_one_step(arriving, leaving):
            _swap_in_one_step(staging, directory, arriving, leaving)
        else:
            _swap_all(staging, directory, arriving, leaving)
        _forget(staging)
    except BaseException as error:
        _undo_or_keep(staging, directory, arriving, leaving, error)
        raise
    return names


def _undo_interrupted(staging: Path, directory: Path) -> None:
    """Put the old files back after a kill or a power failure interrupted a swap; do nothing if the swap was complete.

    ValueError: the journal is damaged; the old files stay in `staging`.
    """
    journal = staging / _JOURNAL
    if not journal.is_file():
        return
    with journal.open("rb") as file:
        content = json.loads(file.read(_MAX_JOURNAL_BYTES))
    arriving, leaving = content["come"], content["go"]
    if not all(is_safe_name(name) for name in (*arriving, *leaving)):
        raise ValueError(f"{journal} names files outside of {directory}")
    _undo(staging, directory, arriving, leaving)


def _is_one_step(arriving: list[str], leaving: list[str]) -> bool:
    """Return whether one rename or removal changes a loader from the old files to the new ones.

    It does if loaders open a single one of the files directly, or if they open entry points alone: a loader takes the
    one that it looks for first, which moves last. A shard that is overwritten would belong to both models.
    """
    opened = _opened_directly({*arriving, *leaving})
    overwritten = [name for name in arriving if name in leaving and is_shard(name)]
    return not overwritten and (len(opened) == 1 or all(entry_point_rank(name) is not None for name in opened))


def _swap_in_one_step(staging: Path, directory: Path, arriving: list[str], leaving: list[str]) -> None:
    _move([name for name in arriving if is_shard(name)], staging / _NEW, directory)
    # The file that a loader looks for first arrives last. Among the files that only leave, it leaves last.
    opened = _opened_directly(arriving)
    for name in reversed(opened):
        if name in leaving:
            make_directories((staging / _OLD / name).parent)
            link_or_copy(directory / name, staging / _OLD / name)
        _move([name], staging / _NEW, directory)
    for name in reversed(_opened_directly(leaving)):
        if name not in opened:
            _move([name], directory, staging / _OLD)
    _move([name for name in leaving if name not in _opened_directly(leaving)], directory, staging / _OLD)
    _move([name for name in arriving if name not in opened and not is_shard(name)], staging / _NEW, directory)


def _swap_all(staging: Path, directory: Path, arriving: list[str], leaving: list[str]) -> None:
    # The entry point that a loader looks for first leaves last and arrives last. Before, it finds the old one or none.
    for name in reversed(_entry_points(leaving)):
        _move([name], directory, staging / _OLD)
    _move(_others(leaving), directory, staging / _OLD)
    _move(_others(arriving), staging / _NEW, directory)
    for name in reversed(_entry_points(arriving)):
        _move([name], staging / _NEW, directory)


def _make_room(staging: Path, directory: Path, arriving: list[str], leaving: list[str]) -> None:
    """Create the directory for old files and the journal; both are on the disk before any file moves."""
    disk.file_system.mkdir(staging / _OLD)
    with replace_file(staging / _JOURNAL) as file:
        file.write(json.dumps({"come": arriving, "go": leaving}, indent=2).encode())
    disk.file_system.sync_directory(directory)


def _undo(staging: Path, directory: Path, arriving: list[str], leaving: list[str]) -> None:
    """Put all old files back, after any step of a swap; if this is interrupted, it can be called again."""
    left = [name for name in leaving if (staging / _OLD / name).exists()]
    arrived = [name for name in arriving if (name in left or name not in leaving) and (directory / name).exists()]
    if _is_one_step(arriving, leaving):
        _move([name for name in left if name not in _opened_directly(left)], staging / _OLD, directory)
        for name in _opened_directly(left):
            _move([name], staging / _OLD, directory)
        # Remove the new files without an old file of the name: entry points before the shards that they name.
        remove_files(directory / name for name in sorted(arrived, key=is_shard) if name not in left)
    else:
        # A loader must not find a new entry point while other files are put back.
        remove_files(directory / name for name in reversed(_entry_points(arrived)))
        remove_files(directory / name for name in _others(arrived) if name not in left)
        _move(_others(left), staging / _OLD, directory)
        for name in _entry_points(left):
            _move([name], staging / _OLD, directory)
    _forget(staging)


def _undo_or_keep(
    staging: Path, directory: Path, arriving: list[str], leaving: list[str], cause: BaseException
) -> None:
    try:
        _undo(staging, directory, arriving, leaving)
    except OSError as error:
        raise SaveError(
            str(directory),
            "to put the files back that were there",
            f"{error}, after {cause}",
            f"They are kept in {staging}. When the disk works again, save again or run `trainweights checkpoint "
            f"gc {directory}`: both put them back.",
        ) from error


def _forget(staging: Path) -> None:
    if (staging / _JOURNAL).exists():
        disk.file_system.unlink(staging / _JOURNAL)
        # The swap is complete. If this fails, a power failure can at worst bring back the journal and old files.
        with contextlib.suppress(OSError):
            disk.file_system.sync_directory(staging)


def _opened_directly(names: Iterable[str]) -> list[str]:
    """Return the files that loaders open without an index, all but shards, cards and digests; entry points first."""
    read = [name for name in names if is_read_by_loaders(name) and not is_shard(name)]
    return [*_entry_points(read), *_others(read)]


def _entry_points(names: Iterable[str]) -> list[str]:
    """Return the entry points among some files, in the order in which a loader looks for them."""
    ranks = {name: rank for name in names if (rank := entry_point_rank(name)) is not None}
    return sorted(ranks, key=ranks.__getitem__)


def _others(names: Iterable[str]) -> list[str]:
    return [name for name in names if entry_point_rank(name) is None]


def _move(names: list[str], source: Path, target: Path) -> None:
    """Rename files from one directory to another, durably."""
    for name in names:
        make_directories((target / name).parent)
    for name in names:
        disk.file_system.rename(source / name, target / name)
    # The new directory before the old one, so that the disk has a name of each file at any time.
    _sync(target / name for name in names)
    _sync(source / name for name in names)


def _sync(paths: Iterable[Path]) -> None:
    for directory in sorted({path.parent for path in paths}):
        disk.file_system.sync_directory(directory)


def _is_same(staging: Path, directory: Path, name: str) -> bool:
    return (directory / name).is_file() and filecmp.cmp(staging / _NEW / name, directory / name, shallow=False)
