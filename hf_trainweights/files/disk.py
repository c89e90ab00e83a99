"""The calls that reach the disk, and claims: temporary names with a lock, which shows whether their writer lives.

Every change of the disk goes through `file_system`, so that a test can record the calls or let them fail.

Files and directories in the making have names that begin with `_trainweights-`. Their writer holds a lock on them,
which the operating system releases when the process ends, however it ends. So a cleaner, the next save or
`trainweights checkpoint gc`, knows which of them are abandoned, and so does one on another machine if the file system
shares its locks. A process ID would say nothing in containers, where every process is number 1.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

TEMPORARY_PREFIX = "_trainweights-"

# If nothing can be locked (Windows, Lustre by default, directories on NFS), the age decides: no save takes a day.
_ABANDONED_SECONDS = 24 * 3600


class FileSystem:
    """The calls through which files reach the disk, one method per system call."""

    def create(self, path: Path) -> int:
        """Create a new regular file and return its descriptor; an existing name is an error."""
        # O_BINARY, because Windows would otherwise write two bytes for each line feed.
        flags = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | flags, 0o666)

    write = staticmethod(os.write)
    read = staticmethod(os.read)
    fsync = staticmethod(os.fsync)
    # Replaces an existing file or empty directory of the new name in the same step.
    rename = staticmethod(os.replace)
    unlink = staticmethod(os.unlink)
    mkdir = staticmethod(os.mkdir)
    rmdir = staticmethod(os.rmdir)
    chmod = staticmethod(os.chmod)

    def start_writing(self, descriptor: int, start: int, size_bytes: int) -> None:
        """Let the disk begin to write some bytes of a file, so that the fsync after the last byte waits for less."""
        if hasattr(os, "posix_fadvise"):  # Linux begins to write pages that it is told are not needed in memory
            with contextlib.suppress(OSError):  # the fsync reports errors
                os.posix_fadvise(descriptor, start, size_bytes, os.POSIX_FADV_DONTNEED)

    def sync_file(self, path: Path) -> None:
        """Force the data of a closed file to the disk."""
        try:
            descriptor = os.open(path, os.O_RDWR)  # some systems refuse to sync a file opened only for reading
        except PermissionError:
            descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Force a directory's names to the disk, if the system and the file system can."""
        if not hasattr(os, "O_DIRECTORY"):  # Windows opens no directory
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network and FUSE file systems
                raise
        finally:
            os.close(descriptor)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name; a symbolic link is not followed, if the system offers that."""
        os.link(source, target, follow_symlinks=os.link not in os.supports_follow_symlinks)

    def set_times(self, path: Path, accessed_ns: int, modified_ns: int) -> None:
        """Set the access and modification time, in nanoseconds."""
        os.utime(path, ns=(accessed_ns, modified_ns))


file_system = FileSystem()


class Claim:
    """A file or directory that this process is writing under a temporary name.

    Args:
        path: Its path.
        descriptor: The open descriptor that holds the lock; None if the system cannot open or lock it.
    """

    def __init__(self, path: Path, descriptor: int | None):
        self.path = path
        self._descriptor = descriptor

    def release(self) -> None:
        """Release the lock, once the file has its final name or is removed; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        _unlock(descriptor)


def temporary_path(directory: Path) -> Path:
    """Return a new random path in a directory, whose name marks a file or directory as unfinished."""
    return directory / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"


def claim_file(directory: Path) -> tuple[Claim, int]:
    """Create an empty file under a temporary name; return its claim and a descriptor that the caller closes."""
    while True:
        path = temporary_path(directory)
        descriptor = file_system.create(path)
        claim = _claim(path, os.dup(descriptor) if fcntl is not None else None)
        if claim is not None:
            return claim, descriptor
        os.close(descriptor)


def claim_directory(directory: Path) -> Claim:
    """Create an empty directory under a temporary name."""
    while True:
        path = temporary_path(directory)
        file_system.mkdir(path)
        claim = _claim(path, _open(path))
        if claim is not None:
            return claim


def move_aside(path: Path) -> Claim:
    """Durably give a directory a temporary name, so that it disappears for everybody else in one step."""
    descriptor = _open(path)
    _lock(descriptor, wait=True)
    claim = Claim(temporary_path(path.parent), descriptor)
    try:
        file_system.rename(path, claim.path)
        file_system.sync_directory(path.parent)
    except BaseException:
        claim.release()
        raise
    return claim


@contextlib.contextmanager
def take_over(path: Path) -> Iterator[bool]:
    """Lock an entry with a temporary name; yield whether its writer is dead, so that the caller may remove it."""
    if path.is_symlink():  # no writer makes one
        yield True
        return
    descriptor = _open(path)
    locked = _lock(descriptor, wait=False)
    try:
        yield is_old(path) if locked is None else locked
    finally:
        _unlock(descriptor)


def is_old(path: Path) -> bool:
    """Return whether an entry is so old that no running save can have written, renamed or linked it."""
    try:
        return time.time() - path.lstat().st_ctime > _ABANDONED_SECONDS
    except OSError:
        return False


@contextlib.contextmanager
def lock_directory(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Lock a directory for one writer and yield whether it was free; the system unlocks it if the process dies.

    A directory that cannot be locked counts as free.
    """
    descriptor = os.open(path, os.O_RDONLY) if fcntl is not None else None
    try:
        yield _lock(descriptor, wait=wait) is not False
    finally:
        _unlock(descriptor)


def _claim(path: Path, descriptor: int | None) -> Claim | None:
    """Lock a new entry and return the claim; None if a cleaner removed the entry before it was locked."""
    _lock(descriptor, wait=True)
    claim = Claim(path, descriptor)
    with contextlib.suppress(FileNotFoundError):
        status = os.stat(path, follow_symlinks=False)
        if descriptor is None or os.path.samestat(status, os.fstat(descriptor)):
            return claim
    claim.release()
    return None


def _open(path: Path) -> int | None:
    """Return a descriptor for locking; None if the system has no locks or cannot open the path."""
    if fcntl is None:
        return None
    # NFS locks only files that are open for writing.
    access = os.O_RDONLY if path.is_dir() else os.O_RDWR
    try:
        return os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None


def _lock(descriptor: int | None, *, wait: bool) -> bool | None:
    """Lock a descriptor; return whether this process has the lock now, None if it cannot be locked."""
    if fcntl is None or descriptor is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _unlock(descriptor: int | None) -> None:
    if fcntl is None or descriptor is None:
        return
    # A worker process forked meanwhile has the descriptor too, and would keep the lock if ours were only closed.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
