"""Opens files for reading, and nothing else: reading a FIFO waits for ever, and reading /dev/zero never ends."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from hf_trainweights.errors import CorruptFileError

_MAX_SHOWN = 200

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFLNK: "a symbolic link",
}


def open_regular_file(path: str | Path, *, follow_links: bool = True) -> BinaryIO:
    """Open a regular file for reading; CorruptFileError: it is something else, or a link that is not to be followed."""
    require_regular_file(path, follow_links=follow_links)
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    # If another process has put a FIFO there in between, opening it must not wait either.
    flags |= getattr(os, "O_NONBLOCK", 0) | (0 if follow_links else getattr(os, "O_NOFOLLOW", 0))
    descriptor = os.open(path, flags)
    try:
        _require_regular(path, os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def require_regular_file(path: str | Path, *, follow_links: bool = True) -> None:
    """Check that a library that opens `path` by itself will find a regular file; CorruptFileError: it will not."""
    try:
        status = os.stat(path, follow_symlinks=follow_links)
    except ValueError as error:  # a null byte, or half of a surrogate pair
        raise _not_regular(repr(str(path)), "a name that no file can have") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise _not_regular(repr(str(path))[:_MAX_SHOWN], "a name that no file can have") from error
        if error.errno not in (errno.ENOENT, errno.ELOOP) or not os.path.islink(path):
            raise
        found = "a symbolic link in a circle" if error.errno == errno.ELOOP else "a symbolic link to nothing"
        raise _not_regular(path, found) from error
    _require_regular(path, status)


def _require_regular(path: str | Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _not_regular(path, _KINDS.get(stat.S_IFMT(status.st_mode), "a special file"))


def _not_regular(path: str | Path, found: str) -> CorruptFileError:
    return CorruptFileError(str(path), "a regular file", found, "Put the file itself there, or use another copy.")
