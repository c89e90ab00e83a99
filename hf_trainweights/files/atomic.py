"""Files and directories that appear complete or not at all, whenever the process or the machine stops.

Data is forced to the disk (fsync) before the file gets its name. A name is durable (survives a power failure) once its
directory has been fsynced as well. Until then the file has a temporary name and a lock, its claim, by which others
see that its writer lives (`files/disk.py`). `save_errors` turns errors of the operating system into errors with advice.
Source: T. S. Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014, sections 3 and 4.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import operator
import os
import re
import stat
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from hf_trainweights.errors import SaveError
from hf_trainweights.files import disk
from hf_trainweights.files.disk import claim_directory, claim_file, temporary_path
from hf_trainweights.files.reading import read_chunks

FREEING_THREAD = "trainweights-free"

# NFS and FUSE show a removed file under a name with such a prefix until it is closed.
SHOWN_PREFIXES = (".nfs", ".fuse_hidden")

_BUFFER_BYTES = 1 << 20
_LARGE_BYTES = 16 << 20
# The disk begins to write after each run of this many bytes, while the process encodes the next ones.
_STARTED_BYTES = 16 << 20
# The answers of file systems without hard links (FAT, object stores through FUSE, Docker bind mounts, ...).
_NO_LINK_ERRNOS = frozenset(
    {errno.EPERM, errno.EXDEV, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS, errno.EACCES, errno.EINVAL}
)

# Error numbers to the two texts of an error: `expected` and `next_step`.
_ADVICE = {
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG): (
        "enough free disk space",
        "Free some space, or choose another directory.",
    ),
    (errno.EEXIST, errno.ENOTDIR, errno.EISDIR): (
        "a directory of files",
        "Choose another name, or remove what is in the way.",
    ),
    (errno.EACCES, errno.EPERM, errno.EROFS): (
        "a directory that can be written to",
        "Check its permissions, or choose another one.",
    ),
    (errno.EIO,): (
        "a disk that works",
        "The disk reports an error: look into the system's log, and save to another one.",
    ),
    (errno.ENOENT,): (
        "a directory that is there and stays there",
        "Create it, or check its path; if it was there, another process has removed or renamed it, or a file in it.",
    ),
}
# How Rust writes error numbers: "(os error 28)", or "Os { code: 28, ...".
_OS_ERROR = re.compile(r"(?:os error|code:) (\d+)")
_OTHERWISE = "a disk that takes the files", "Check the disk, or choose another directory."


class _NewFile(io.RawIOBase):
    """A file being written, without a buffer; `io.BufferedWriter` gathers torch.save's many small writes for it."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._size_bytes = self._started_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        count = disk.file_system.write(self._descriptor, memoryview(data))
        self._size_bytes += count
        waiting_bytes = self._size_bytes - self._started_bytes
        if waiting_bytes >= _STARTED_BYTES:
            disk.file_system.start_writing(self._descriptor, self._started_bytes, waiting_bytes)
            self._started_bytes = self._size_bytes
        return count

    def sync(self) -> None:
        disk.file_system.fsync(self._descriptor)

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
            super().close()


@contextlib.contextmanager
def _write(path: Path, descriptor: int, final: Path | None = None) -> Iterator[BinaryIO]:
    """Yield a new binary file; force it to the disk and name it `final` at the end, or remove it on an error."""
    raw = _NewFile(descriptor)
    try:
        with io.BufferedWriter(raw, _BUFFER_BYTES) as file:
            yield file
            file.flush()
            raw.sync()
        if final is not None:
            disk.file_system.rename(path, final)
    except BaseException:
        with contextlib.suppress(OSError):
            raw.close()
        with contextlib.suppress(OSError):
            disk.file_system.unlink(path)
        raise


def create_file(path: Path) -> contextlib.AbstractContextManager[BinaryIO]:
    """Create a binary file for a block; at the block's end its data is on the disk, but its name is not durable yet."""
    return _write(path, disk.file_system.create(path))


@contextlib.contextmanager
def replace_file(path: Path, also_replaced: Iterable[Path] = ()) -> Iterator[BinaryIO]:
    """Yield a binary file that durably replaces `path` when the block ends without an error.

    From the start it has the permissions of `path`, or those of the files `also_replaced` if `path` is missing.
    """
    claim, descriptor = claim_file(path.parent)
    try:
        with _write(claim.path, descriptor, path) as file:
            keep_permissions(claim.path, path, also_replaced)
            yield file
    finally:
        claim.release()
    disk.file_system.sync_directory(path.parent)


def keep_permissions(new: Path, replaced: Path, also_replaced: Iterable[Path] = ()) -> None:
    """Give a new file or directory the permissions of `replaced`; if that is missing, those that all others grant."""
    modes = []
    for path in [replaced] if replaced.exists() else also_replaced:
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            modes.append(stat.S_IMODE(path.stat().st_mode))
    if modes:
        _set_permissions(new, functools.reduce(operator.and_, modes))


@contextlib.contextmanager
def keeping_permissions(path: Path) -> Iterator[None]:
    """Restore the permissions of a file that the block removes and writes again."""
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    yield
    if mode is not None and path.exists():
        _set_permissions(path, mode)


def _set_permissions(path: Path, mode: int) -> None:
    # A file system without permissions shows the same mode for all files, so that no chmod is tried there.
    if mode != stat.S_IMODE(path.stat().st_mode):
        disk.file_system.chmod(path, mode)


def move_file(source: Path, target: Path, also_replaced: Iterable[Path] = ()) -> None:
    """Force a file to the disk, then give it its final name in the same directory, durably.

    If there is no file of that name yet, the new one gets the permissions of the files `also_replaced`.
    """
    keep_permissions(source, target, also_replaced)
    disk.file_system.sync_file(source)
    disk.file_system.rename(source, target)
    disk.file_system.sync_directory(target.parent)


@contextlib.contextmanager
def create_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory that durably becomes `path` when the block ends without an error.

    The caller writes its files with `create_file`, or calls `sync_tree` before the block ends.
    """
    require_vacant(path)
    make_directories(path.parent)
    claim = claim_directory(path.parent)
    # The caller may lock the directory that it gets, and the claimed one is locked already. So it gets one inside.
    temporary = claim.path / path.name
    try:
        disk.file_system.mkdir(temporary)
        keep_permissions(temporary, path)
        yield temporary
        disk.file_system.sync_directory(temporary)
        require_vacant(path)  # another process may have been faster; renaming over its files would fail anyway
        disk.file_system.rename(temporary, path)
        disk.file_system.sync_directory(path.parent)
    finally:
        remove_tree(claim.path, ignore_errors=True)
        claim.release()


def require_vacant(path: Path) -> None:
    """Check that `path` is missing or an empty directory, so that replacing it loses nothing; else SaveError."""
    if not os.path.lexists(path):
        return
    is_directory = path.is_dir() and not path.is_symlink()
    if not is_directory or any(path.iterdir()):
        actual = "a directory that is not empty" if is_directory else "a file or a link"
        raise SaveError(str(path), "a missing or empty directory", actual, "Choose another path or remove it first.")


def make_directories(path: Path) -> None:
    """Create `path` and its missing parents, durably."""
    if path.is_dir():
        return
    make_directories(path.parent)
    try:
        disk.file_system.mkdir(path)
    except FileExistsError:
        if not path.is_dir():  # else another process was faster
            raise
    disk.file_system.sync_directory(path.parent)


def link_or_copy(source: Path, target: Path) -> None:
    """Give a regular file a second, new name: as a hard link, or as a copy if the file system has no hard links."""
    try:
        disk.file_system.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINK_ERRNOS:
            raise
        with replace_file(target, [source]) as file:
            for chunk in read_chunks(source):
                file.write(chunk)
        return
    disk.file_system.sync_directory(target.parent)


def sync_tree(directory: Path) -> None:
    """Force a directory to the disk without following links: the data of each file, then the names."""
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            sync_tree(Path(entry.path))
        elif entry.is_file(follow_symlinks=False):
            disk.file_system.sync_file(Path(entry.path))
    disk.file_system.sync_directory(directory)


def remove_files(files: Iterable[Path]) -> None:
    """Remove the files that exist, durably and in the given order, so that an index goes before its shards."""
    for file in files:
        if file.exists():
            disk.file_system.unlink(file)
            disk.file_system.sync_directory(file.parent)


@contextlib.contextmanager
def freeing_in_background(directory: Path) -> Iterator[None]:
    """Let a thread free the memory of large files of a directory that the block replaces or removes.

    Freeing a gigabyte of a file takes the kernel .7 seconds. It happens when the last user of a removed file closes it.
    This holds the files open until the block has ended, and a thread closes them. If a tensor were still mapped from a
    file, the tensor's end would free it, with Python's lock held, and all threads would wait, also one that trains. So
    the block must end without such tensors.
    """
    with contextlib.ExitStack() as open_files:
        descriptors = [*_large_files(directory)] if os.name == "posix" else []  # Windows replaces no file that is open
        for descriptor in descriptors:
            open_files.callback(os.close, descriptor)
        yield
        if descriptors and not _shows_removed(directory):
            threading.Thread(target=open_files.pop_all().close, name=FREEING_THREAD, daemon=True).start()


def _shows_removed(directory: Path) -> bool:
    return any(path.name.startswith(SHOWN_PREFIXES) for path in directory.rglob(".*"))


def _large_files(directory: Path) -> Iterator[int]:
    """Open the large regular files of a directory, and yield their descriptors."""
    for file in directory.glob("*"):
        with contextlib.suppress(OSError):
            if file.lstat().st_size >= _LARGE_BYTES and not file.is_dir():
                yield os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)


def remove_tree(path: Path, *, ignore_errors: bool = False) -> None:
    """Remove a directory and everything in it; links are removed, never followed.

    While NFS or FUSE shows a removed file that is still open, its directory stays, for a later call to remove.
    """
    try:
        for entry in list(os.scandir(path)):
            if entry.is_dir(follow_symlinks=False):
                remove_tree(Path(entry.path), ignore_errors=ignore_errors)
                continue
            may_stay = ignore_errors or entry.name.startswith(SHOWN_PREFIXES)
            with contextlib.suppress(OSError) if may_stay else contextlib.nullcontext():
                disk.file_system.unlink(Path(entry.path))
        disk.file_system.rmdir(path)
    except OSError:
        if not (ignore_errors or _shows_removed(path)):
            raise


def replace_by_link(source: Path, target: Path) -> None:
    """Durably replace `target` by a hard link to `source`, or by a copy; both are in the same directory."""
    aside = temporary_path(target.parent)
    link_or_copy(source, aside)
    move_file(aside, target)


@contextlib.contextmanager
def save_errors(path: Path, outcome: str) -> Iterator[None]:
    """Turn an error of the operating system while `path` is written into a `SaveError` that tells the outcome."""
    try:
        yield
    except SaveError:
        raise
    except OSError as error:
        raise _save_error(path, outcome, error, error.errno) from error
    except Exception as error:
        # safetensors reports failed writes as its own SafetensorError, which has the error number only in its text.
        if type(error).__module__.startswith("safetensors"):
            number = _OS_ERROR.search(str(error))
            raise _save_error(path, outcome, error, int(number[1]) if number else None) from error
        raise


def _save_error(path: Path, outcome: str, error: Exception, number: int | None) -> SaveError:
    advice = (advice for numbers, advice in _ADVICE.items() if number in numbers)
    expected, next_step = next(advice, _OTHERWISE)
    return SaveError(str(path), expected, str(error), f"{outcome} {next_step}")
