"""The one object through which every change reaches the disk, so that a test can record the calls or let them fail."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path


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
