"""The calls that reach the disk, temporary names, and the lock that tells whether whoever writes under one still lives.

Every change goes through one object, so that a test can record the calls or let them fail.

Files and directories in the making have names that begin with `_trainweights-`. Their writer holds a lock on them,
which the operating system releases when the process ends, however it ends. So a cleaner on this machine, and where the
file system shares its locks on any other, knows what is abandoned. A process ID would say nothing in containers, where
every one is 1.
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

# Where nothing can be locked (Windows, Lustre by default, directories on NFS), the age decides: no save takes a day.
_ABANDONED_SECONDS = 24 * 3600


class FileSystem:
    """The calls through which files reach the disk, one method per system call."""

    def create(self, path: Path) -> int:
        """Create a new regular file and return its descriptor; an existing name is an error."""
        # Without O_BINARY Windows would write two bytes for each that is a line feed.
        flags = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | flags, 0o666)

    write = staticmethod(os.write)
    read = staticmethod(os.read)
    fsync = staticmethod(os.fsync)
    # An existing file or empty directory under the new name gives way in the same step.
    rename = staticmethod(os.replace)
    unlink = staticmethod(os.unlink)
    mkdir = staticmethod(os.mkdir)
    rmdir = staticmethod(os.rmdir)
    chmod = staticmethod(os.chmod)

    def start_writing(self, descriptor: int, start: int, size_bytes: int) -> None:
        """Let the disk begin with a part of a file, so that an fsync at its end waits for less."""
        if hasattr(os, "posix_fadvise"):  # Linux writes what it is told that nobody needs in memory
            with contextlib.suppress(OSError):  # fsync tells what goes wrong
                os.posix_fadvise(descriptor, start, size_bytes, os.POSIX_FADV_DONTNEED)

    def sync_file(self, path: Path) -> None:
        """Force the data of a file that was closed before to the disk."""
        try:
            descriptor = os.open(path, os.O_RDWR)  # some systems refuse to sync what is open for reading only
        except PermissionError:
            descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Force a directory's names to the disk, where system and file system offer that."""
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
        """Give a file a second name; a link to it is not followed, where the system can tell."""
        os.link(source, target, follow_symlinks=os.link not in os.supports_follow_symlinks)

    def set_times(self, path: Path, accessed_ns: int, modified_ns: int) -> None:
        """Set the access and modification time, in nanoseconds."""
        os.utime(path, ns=(accessed_ns, modified_ns))


file_system = FileSystem()


class Claim:
    """A file or directory that this process is writing under a temporary name.

    Args:
        path: Its path.
        descriptor: An open descriptor that carries the lock, where there are locks; None where nothing can be opened.
    """

    def __init__(self, path: Path, descriptor: int | None):
        self.path = path
        self._descriptor = descriptor

    def release(self) -> None:
        """Let go of it, once it has its final name or is gone; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        _unlock(descriptor)


def temporary_path(directory: Path) -> Path:
    """Return a fresh name in a directory that marks its bearer as unfinished."""
    return directory / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"


def claim_file(directory: Path) -> tuple[Claim, int]:
    """Create an empty file under a temporary name; return the claim and a descriptor for the caller to close."""
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
    """Give a directory a temporary name, durably: it is gone for everybody else in one step."""
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
    """Hold what has a temporary name against others; yield whether its writer is dead, so that it may be removed."""
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
    """Return whether no save that still runs can have written, renamed or linked a file or directory."""
    try:
        return time.time() - path.lstat().st_ctime > _ABANDONED_SECONDS
    except OSError:
        return False


@contextlib.contextmanager
def lock_directory(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold a directory for one writer, and yield whether it was free; the system lets go of it if the process dies.

    Where nothing can be locked it always is free.
    """
    descriptor = os.open(path, os.O_RDONLY) if fcntl is not None else None
    try:
        yield _lock(descriptor, wait=wait) is not False
    finally:
        _unlock(descriptor)


def _claim(path: Path, descriptor: int | None) -> Claim | None:
    """Return the claim on a fresh entry; None if a cleaner came between its creation and its lock, and removed it."""
    _lock(descriptor, wait=True)
    claim = Claim(path, descriptor)
    with contextlib.suppress(FileNotFoundError):
        status = os.stat(path, follow_symlinks=False)
        if descriptor is None or os.path.samestat(status, os.fstat(descriptor)):
            return claim
    claim.release()
    return None


def _open(path: Path) -> int | None:
    """Return a descriptor to lock by; None where there is none."""
    if fcntl is None:
        return None
    # NFS locks what is open for writing alone.
    access = os.O_RDONLY if path.is_dir() else os.O_RDWR
    try:
        return os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None


def _lock(descriptor: int | None, *, wait: bool) -> bool | None:
    """Return whether the lock is ours now; None where nothing can be locked."""
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
    # A worker process that was forked meanwhile has the descriptor too: closing ours would leave the lock to it.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
