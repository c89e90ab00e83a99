"""Temporary names, and the lock that tells whether whoever writes under one still lives.

Files and directories in the making have names that begin with `_trainweights-`. Their writer holds a lock on them,
which the operating system releases when the process ends, however it ends. So a cleaner on this machine, and where the
file system shares its locks on any other, knows what is abandoned. A process ID would say nothing in containers, where
every one is 1.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from hf_trainweights.files import disk

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

TEMPORARY_PREFIX = "_trainweights-"

# Where nothing can be locked (Windows, Lustre by default, directories on NFS), the age decides: no save takes a day.
_ABANDONED_SECONDS = 24 * 3600


class Claim:
    """A file or directory that this process is writing under a temporary name.

    Args:
        path: Its path.
        descriptor: An open descriptor that carries the lock; None where nothing can be locked.
    """

    def __init__(self, path: Path, descriptor: int | None):
        self.path = path
        self._descriptor = descriptor

    def release(self) -> None:
        """Let go of it, once it has its final name or is gone; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            _unlock(descriptor)


def temporary_path(directory: Path) -> Path:
    """Return a fresh name in a directory that marks its bearer as unfinished."""
    return directory / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"


def claim_file(directory: Path) -> tuple[Claim, int]:
    """Create an empty file under a temporary name; return the claim and a descriptor for the caller to close."""
    while True:
        path = temporary_path(directory)
        descriptor = disk.file_system.create(path)
        claim = _claim(path, os.dup(descriptor))
        if claim is not None:
            return claim, descriptor
        os.close(descriptor)


def claim_directory(directory: Path) -> Claim:
    """Create an empty directory under a temporary name."""
    while True:
        path = temporary_path(directory)
        disk.file_system.mkdir(path)
        claim = _claim(path, _open(path))
        if claim is not None:
            return claim


def move_aside(path: Path) -> Claim:
    """Give a directory a temporary name, durably: it is gone for everybody else in one step."""
    descriptor = _open(path)
    locked = descriptor is not None and _lock(descriptor, wait=True)
    aside = temporary_path(path.parent)
    try:
        disk.file_system.rename(path, aside)
        disk.file_system.sync_directory(path.parent)
    except BaseException:
        if descriptor is not None:
            _unlock(descriptor)
        raise
    return Claim(aside, descriptor if locked else _close(descriptor))


@contextlib.contextmanager
def take_over(path: Path) -> Iterator[bool]:
    """Hold what has a temporary name against others; yield whether its writer is dead, so that it may be removed."""
    if path.is_symlink():  # no writer makes one
        yield True
        return
    descriptor = _open(path)
    locked = None if descriptor is None else _lock(descriptor, wait=False)
    try:
        yield is_old(path) if locked is None else locked
    finally:
        if descriptor is not None:
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
        yield descriptor is None or _lock(descriptor, wait=wait) is not False
    finally:
        if descriptor is not None:
            _unlock(descriptor)


def _claim(path: Path, descriptor: int | None) -> Claim | None:
    """Return the claim on a fresh entry; None if a cleaner came between its creation and its lock, and removed it."""
    is_locked = descriptor is not None and _lock(descriptor, wait=True) is not None
    try:
        status = os.stat(path, follow_symlinks=False)
        is_there = descriptor is None or os.path.samestat(status, os.fstat(descriptor))
    except FileNotFoundError:
        is_there = False
    if is_there:
        return Claim(path, descriptor if is_locked else _close(descriptor))
    if descriptor is not None:
        _unlock(descriptor)
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


def _lock(descriptor: int, *, wait: bool) -> bool | None:
    """Return whether the lock is ours now; None where the file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _unlock(descriptor: int) -> None:
    if fcntl is not None:
        # A worker process that was forked meanwhile has the descriptor too: closing ours would leave the lock to it.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)
