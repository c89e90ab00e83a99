"""File-system primitives that leave the old state or the new one, whenever the process or the machine stops.

Every call that changes a disk goes through the one object `file_system`, so a test can put a recorder or a
failing disk in its place. Data is forced to the disk (fsync) before the name that shows it appears; a name is
durable once its directory has been fsynced as well.
Source: T. S. Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014, sections 3 and 4.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hf_trainweights.errors import SaveError

TEMPORARY_PREFIX = "_trainweights-"

_CHUNK_BYTES = 1 << 20
# What file systems without hard links answer (FAT, object stores through FUSE, Docker bind mounts, ...).
_NO_LINK_ERRNOS = frozenset({errno.EPERM, errno.EXDEV, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS, errno.EACCES})


class FileSystem:
    """The calls through which a checkpoint reaches the disk, one method per system call."""

    def create(self, path: Path) -> int:
        """Creates a new regular file and returns its descriptor; an existing name is an error."""
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_CLOEXEC", 0), 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Writes at the end of the file and returns how many bytes were taken."""
        return os.write(descriptor, data)

    def read(self, descriptor: int, count: int) -> bytes:
        """Reads up to `count` bytes."""
        return os.read(descriptor, count)

    def fsync(self, descriptor: int) -> None:
        """Forces a file's data to the disk."""
        os.fsync(descriptor)

    def sync_file(self, path: Path) -> None:
        """Forces the data of a file that was closed before to the disk."""
        descriptor = os.open(path, os.O_RDWR)  # some systems refuse to sync what is open for reading only
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Forces a directory's names to the disk, where the file system offers that."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network and FUSE file systems
                raise
        finally:
            os.close(descriptor)

    def link(self, source: Path, target: Path) -> None:
        """Gives a file a second name."""
        os.link(source, target, follow_symlinks=False)

    def rename(self, source: Path, target: Path) -> None:
        """Moves a name; an existing file or empty directory at `target` gives way in the same step."""
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        """Removes a file's name."""
        os.unlink(path)

    def mkdir(self, path: Path) -> None:
        """Creates a directory."""
        os.mkdir(path)

    def rmdir(self, path: Path) -> None:
        """Removes an empty directory."""
        os.rmdir(path)

    def set_times(self, path: Path, accessed_ns: int, modified_ns: int) -> None:
        """Sets the access and modification time, in nanoseconds."""
        os.utime(path, ns=(accessed_ns, modified_ns))


file_system = FileSystem()


class _NewFile(io.RawIOBase):
    """The raw half of a file being written; `io.BufferedWriter` gathers torch.save's many small writes."""

    def __init__(self, path: Path):
        self._descriptor = file_system.create(path)

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        return file_system.write(self._descriptor, memoryview(data))

    def sync(self) -> None:
        file_system.fsync(self._descriptor)

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
            super().close()


@contextlib.contextmanager
def create_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Yields a new file to write into; when the block ends its data is on the disk, its name not yet.

    Args:
        path: A name that does not exist, in a directory that does.
        durable: False where nobody may wait for the disk now; `move_file` forces the data to it later.

    Yields:
        A binary file, write only, not seekable.

    Raises:
        OSError: The disk is full or refuses. A partly written file is removed.
    """
    raw = _NewFile(path)
    try:
        with io.BufferedWriter(raw, _CHUNK_BYTES) as file:
            yield file
            file.flush()
            if durable:
                raw.sync()
    except BaseException:
        with contextlib.suppress(OSError):
            raw.close()
        with contextlib.suppress(OSError):
            file_system.unlink(path)
        raise


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a file that takes the place of `path` when the block ends without an error, durably.

    Args:
        path: A name in an existing directory; the file there, if any, stays whole until the last step.

    Yields:
        A binary file, write only, not seekable.

    Raises:
        OSError: The disk is full or refuses; `path` is as it was.
    """
    temporary = temporary_path(path.parent)
    with create_file(temporary) as file:
        yield file
    try:
        file_system.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            file_system.unlink(temporary)
        raise
    file_system.sync_directory(path.parent)


def move_file(source: Path, target: Path) -> None:
    """Gives a file written with `create_file` its final name, durably, data first.

    Args:
        source: The file.
        target: A name in the same directory; a file there stays whole until the last step.

    Raises:
        OSError: The disk refuses; both names are as they were, or the move is not on the disk yet.
    """
    file_system.sync_file(source)
    file_system.rename(source, target)
    file_system.sync_directory(target.parent)


@contextlib.contextmanager
def create_directory(path: Path) -> Iterator[Path]:
    """Yields a temporary directory that becomes `path` when the block ends without an error, durably.

    Args:
        path: A missing name, or an existing empty directory. Missing parents are created.

    Yields:
        The temporary directory, in the parent of `path`. Files in it are written with `create_file`.

    Raises:
        SaveError: `path` holds something.
        OSError: The disk is full or refuses. Nothing is left behind.
    """
    require_vacant(path)
    make_directories(path.parent)
    temporary = temporary_path(path.parent)
    file_system.mkdir(temporary)
    try:
        yield temporary
        file_system.sync_directory(temporary)
        require_vacant(path)  # another process may have been faster; renaming over its files would fail anyway
        file_system.rename(temporary, path)
    except BaseException:
        remove_tree(temporary, ignore_errors=True)
        raise
    file_system.sync_directory(path.parent)


def require_vacant(path: Path) -> None:
    """Checks that a directory can be created at `path` without losing anything.

    Args:
        path: Any path.

    Raises:
        SaveError: There is a file, a link or a directory that is not empty.
    """
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir() or any(path.iterdir()):
        found = "a directory that is not empty" if path.is_dir() else "a file or a link"
        raise SaveError(str(path), "a missing or empty directory", found, "Choose another path or remove it first.")


def make_directories(path: Path) -> None:
    """Creates `path` and its missing parents, durably.

    Args:
        path: A directory path.

    Raises:
        OSError: A parent is a file, or the disk refuses.
    """
    if path.is_dir():
        return
    make_directories(path.parent)
    with contextlib.suppress(FileExistsError):  # another rank was faster
        file_system.mkdir(path)
    file_system.sync_directory(path.parent)


def temporary_path(directory: Path) -> Path:
    """Returns a fresh name in `directory` that marks its bearer as unfinished.

    Args:
        directory: Where the finished file or directory will lie; a rename must not cross file systems.

    Returns:
        A path that does not exist.
    """
    return directory / f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"


def link_or_copy(source: Path, target: Path) -> None:
    """Makes a file appear under a second name: as a hard link, or as a copy where links are not possible.

    Args:
        source: A regular file.
        target: A name that does not exist.

    Raises:
        OSError: `source` is missing, `target` exists, or the disk is full or refuses.
    """
    try:
        file_system.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINK_ERRNOS:
            raise
        with replace_file(target) as file:
            for chunk in read_chunks(source):
                file.write(chunk)
        return
    file_system.sync_directory(target.parent)


def read_chunks(path: Path) -> Iterator[bytes]:
    """Yields the bytes of a regular file, never following a link in its last component.

    Args:
        path: The file.

    Yields:
        Pieces of at most 1 MiB.

    Raises:
        OSError: It is missing, is a link, a directory or a device, or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        while chunk := file_system.read(descriptor, _CHUNK_BYTES):
            yield chunk
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a regular file, in hexadecimal.

    Args:
        path: The file; a link is an error.

    Returns:
        64 hexadecimal digits.

    Raises:
        OSError: It cannot be read.
    """
    digest = hashlib.sha256()
    for chunk in read_chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


class DigestedFile:
    """A file that is written to, and the digest of what is: it need not be read again.

    Args:
        file: A binary file open for writing, at its beginning.
    """

    def __init__(self, file: BinaryIO):
        self._file = file
        self._digest = hashlib.sha256()
        self.size_bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        """Writes all of `data` and returns its length."""
        self._digest.update(data)
        self.size_bytes += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Flushes the file: torch.save asks for it."""
        self._file.flush()

    def sha256(self) -> str:
        """Returns the SHA-256 of what was written, in hexadecimal."""
        return self._digest.hexdigest()


def remove_tree(path: Path, *, ignore_errors: bool = False) -> None:
    """Removes a directory and everything in it; links are removed, never followed.

    Args:
        path: The directory.
        ignore_errors: Go on where the disk refuses, as when cleaning up after another error.

    Raises:
        OSError: The disk refuses, unless `ignore_errors`.
    """
    with contextlib.suppress(OSError) if ignore_errors else contextlib.nullcontext():
        for entry in list(os.scandir(path)):
            if entry.is_dir(follow_symlinks=False):
                remove_tree(Path(entry.path), ignore_errors=ignore_errors)
            else:
                with contextlib.suppress(OSError) if ignore_errors else contextlib.nullcontext():
                    file_system.unlink(Path(entry.path))
        file_system.rmdir(path)
