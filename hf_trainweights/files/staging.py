"""The one way to write files into a directory that may hold a model already: aside, then all of them into place.

So a loader finds the old model, the new one, or an error. What a writer that died left there is removed, and what its
save took away is put back.

Where only weights change, a loader never meets an error: new shards have names of their own, so they come before the
entry point that names them, and old ones go after it. No order of renames changes more files at once. Where config.json
changes, too, the files that loaders open first, the entry points, therefore go out of the way before anything else
moves, and the new ones come last: in between a loader finds no model, and never parts of two. All that goes is kept in
the staging directory, beside a journal, until everything is in place. An error puts it back at once; after a kill or a
power failure `_undo_interrupted` does.

    <directory>/_trainweights-<random>/new/          what is to come
    <directory>/_trainweights-<random>/old/          what was there
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
                staged = StagedFiles(claim.path / _NEW)
                disk.file_system.mkdir(staged.path)
                _hide_from_those_who_may_not_read(staged.path, directory)
                yield staged
                _keep_permissions(staged.path, directory, is_replaced)
                sync_tree(claim.path)
                staged.names = _swap_in(claim.path, directory, is_replaced)
            finally:
                # With a journal the old files are in there: the disk refused to take them back.
                if not (claim.path / _JOURNAL).exists():
                    remove_tree(claim.path, ignore_errors=True)
                claim.release()


def _hide_from_those_who_may_not_read(new: Path, directory: Path) -> None:
    """Close a directory to the group, or to others, who may not read some file that new ones may replace."""
    mode = open_to = stat.S_IMODE(new.stat().st_mode)
    for path in filter(Path.is_file, directory.iterdir()):
        readable = path.stat().st_mode
        mode &= ~(stat.S_IRWXG * (not readable & stat.S_IRGRP) | stat.S_IRWXO * (not readable & stat.S_IROTH))
    if mode != open_to:
        disk.file_system.chmod(new, mode)


def _keep_permissions(new: Path, directory: Path, is_replaced: Callable[[str], bool]) -> None:
    """Give new files the permissions of those that they replace: of the same name, or else all of the same kind."""
    earlier = [path for path in directory.iterdir() if path.is_file() and is_replaced(path.name)]
    for file in filter(Path.is_file, new.rglob("*")):
        name = file.relative_to(new).as_posix()
        keep_permissions(file, directory / name, earlier if is_replaced(name) else ())


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
            _undo_interrupted(path, path.parent)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            stays = "stays: it may hold what a save replaced, but its journal cannot be read"
            _logger.warning("%s %s: %s", path, stays, error)
            return False
        remove_tree(path)
        return not path.exists()


def _swap_in(staging: Path, directory: Path, is_replaced: Callable[[str], bool]) -> list[str]:
    """Move the files of `staging/new` to where they belong, all or none, and return their names, sorted.

    All of them are on the disk already. If a new file is of the kind that `is_replaced` tells, such as weight files,
    all older files of that kind go.
    """
    names = sorted(
        path.relative_to(staging / _NEW).as_posix() for path in (staging / _NEW).rglob("*") if path.is_file()
    )
    for name in names:
        if (directory / name).is_dir():
            raise IsADirectoryError(errno.EISDIR, "a directory has the name of a file to be written", name)
    # An entry point moves even where it is the same, as an index of equal shapes is: without it no loader begins.
    come = [name for name in names if entry_point_rank(name) is not None or not _is_same(staging, directory, name)]
    go = [name for name in come if (directory / name).exists()]
    present = sorted(path.name for path in directory.iterdir() if path.is_file())
    if any(is_replaced(name) for name in names):
        go += [name for name in present if is_replaced(name) and name not in names]
    try:
        _make_room(staging, directory, come, go)
        if _is_one_step(come, go):
            _swap_in_one_step(staging, directory, come, go)
        else:
            _swap_all(staging, directory, come, go)
        _forget(staging)
    except BaseException as error:
        _undo_or_keep(staging, directory, come, go, error)
        raise
    return names


def _undo_interrupted(staging: Path, directory: Path) -> None:
    """Put back what a swap took away that was interrupted by a kill or a power failure; do nothing after a whole one.

    ValueError: the journal is damaged; the old files stay in `staging`.
    """
    journal = staging / _JOURNAL
    if not journal.is_file():
        return
    with journal.open("rb") as file:
        content = json.loads(file.read(_MAX_JOURNAL_BYTES))
    come, go = content["come"], content["go"]
    if not all(is_safe_name(name) for name in (*come, *go)):
        raise ValueError(f"{journal} names files outside of {directory}")
    _undo(staging, directory, come, go)


def _is_one_step(come: list[str], go: list[str]) -> bool:
    """Return whether one rename or removal takes a loader from the old files to the new ones."""
    opened = _opened_first({*come, *go})
    overwritten = [name for name in come if name in go and is_shard(name)]
    return not overwritten and (len(opened) == 1 or all(entry_point_rank(name) is not None for name in opened))


def _swap_in_one_step(staging: Path, directory: Path, come: list[str], go: list[str]) -> None:
    _move([name for name in come if is_shard(name)], staging / _NEW, directory)
    # The one that a loader looks for first changes last among those that come, and among those that only go.
    opened = _opened_first(come)
    for name in reversed(opened):
        if name in go:
            make_directories((staging / _OLD / name).parent)
            link_or_copy(directory / name, staging / _OLD / name)
        _move([name], staging / _NEW, directory)
    for name in reversed(_opened_first(go)):
        if name not in opened:
            _move([name], directory, staging / _OLD)
    _move([name for name in go if name not in _opened_first(go)], directory, staging / _OLD)
    _move([name for name in come if name not in opened and not is_shard(name)], staging / _NEW, directory)


def _swap_all(staging: Path, directory: Path, come: list[str], go: list[str]) -> None:
    # The one that a loader looks for first goes last, and comes last: before that it finds none, or the same as ever.
    for name in reversed(_entry_points(go)):
        _move([name], directory, staging / _OLD)
    _move(_others(go), directory, staging / _OLD)
    _move(_others(come), staging / _NEW, directory)
    for name in reversed(_entry_points(come)):
        _move([name], staging / _NEW, directory)


def _make_room(staging: Path, directory: Path, come: list[str], go: list[str]) -> None:
    """Make the place for what goes, and the journal; both are on the disk before anything is moved."""
    disk.file_system.mkdir(staging / _OLD)
    with replace_file(staging / _JOURNAL) as file:
        file.write(json.dumps({"come": come, "go": go}, indent=2).encode())
    disk.file_system.sync_directory(directory)


def _undo(staging: Path, directory: Path, come: list[str], go: list[str]) -> None:
    """Put everything back, from whatever step on; it may be interrupted and called again."""
    kept = [name for name in go if (staging / _OLD / name).exists()]
    fresh = [name for name in come if (name in kept or name not in go) and (directory / name).exists()]
    if _is_one_step(come, go):
        _move([name for name in kept if name not in _opened_first(kept)], staging / _OLD, directory)
        for name in _opened_first(kept):
            _move([name], staging / _OLD, directory)
        # What no old file has replaced: entry points before the shards that they name.
        remove_files(directory / name for name in sorted(fresh, key=is_shard) if name not in kept)
    else:
        # No loader may find a new entry point while other files become old again.
        remove_files(directory / name for name in reversed(_entry_points(fresh)))
        remove_files(directory / name for name in _others(fresh) if name not in kept)
        _move(_others(kept), staging / _OLD, directory)
        for name in _entry_points(kept):
            _move([name], staging / _OLD, directory)
    _forget(staging)


def _undo_or_keep(staging: Path, directory: Path, come: list[str], go: list[str], cause: BaseException) -> None:
    try:
        _undo(staging, directory, come, go)
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
        # All is in place. If this fails, a power failure can at worst bring the journal back, and the old files by it.
        with contextlib.suppress(OSError):
            disk.file_system.sync_directory(staging)


def _opened_first(names: Iterable[str]) -> list[str]:
    """Return what loaders open themselves, all but shards, cards and digests; what they look for first at the head."""
    read = [name for name in names if is_read_by_loaders(name) and not is_shard(name)]
    return [*_entry_points(read), *_others(read)]


def _entry_points(names: Iterable[str]) -> list[str]:
    """Return the entry points among some files, the one that a loader looks for first at the head."""
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
    # Where they are before where they are no longer: at no time may the platter hold them nowhere.
    _sync(target / name for name in names)
    _sync(source / name for name in names)


def _sync(paths: Iterable[Path]) -> None:
    for directory in sorted({path.parent for path in paths}):
        disk.file_system.sync_directory(directory)


def _is_same(staging: Path, directory: Path, name: str) -> bool:
    return (directory / name).is_file() and filecmp.cmp(staging / _NEW / name, directory / name, shallow=False)
