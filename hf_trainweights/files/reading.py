"""Reading files: regular files, their digests, signed JSON, the zip archives of torch.save, and checks of file names.

Only regular files are opened, because reading a FIFO waits for ever, and /dev/zero never ends.

A signed JSON object carries its own digest, so that a flipped bit in the file itself is found too. The text is UTF-8
with sorted keys, two spaces of indentation and a newline at the end. An object within five others, such as the row of a
tensor in a report, is on one line. The `sha256` is the digest of the same text with an empty string in place of the
digest, and only the bytes that have this digest are accepted. A digest finds damage, not forgery: anyone can compute
it.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import hashlib
import json
import os
import re
import stat
import zipfile
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeGuard

from zlib_ng import zlib_ng

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files import disk

# A line break within an object or array that lies in five others.
_DEEP_LINE = re.compile(r"\n {12,}|\n {10}(?=[\]}])")
_MAX_SHOWN = 200

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFLNK: "a symbolic link",
}


def open_regular_file(path: str | Path, *, follow_links: bool = True) -> BufferedReader:
    """Open a regular file for reading; CorruptFileError: it is not one, or a link and `follow_links` is False."""
    require_regular_file(path, follow_links=follow_links)
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    # If another process has just put a FIFO there, opening it must not wait.
    flags |= getattr(os, "O_NONBLOCK", 0) | (0 if follow_links else getattr(os, "O_NOFOLLOW", 0))
    descriptor = os.open(path, flags)
    try:
        _require_regular(path, os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def require_regular_file(path: str | Path, *, follow_links: bool = True) -> None:
    """Check that a path leads to a regular file, before a library opens it by itself; CorruptFileError: it does not."""
    try:
        status = os.stat(path, follow_symlinks=follow_links)
    except (OSError, ValueError) as error:
        # A ValueError means a null byte, or half of a surrogate pair.
        if not isinstance(error, OSError) or error.errno == errno.ENAMETOOLONG:
            raise _not_regular(repr(str(path))[:_MAX_SHOWN], "a name that no file can have") from error
        if error.errno not in (errno.ENOENT, errno.ELOOP) or not os.path.islink(path):
            raise
        kind = "a symbolic link in a circle" if error.errno == errno.ELOOP else "a symbolic link to nothing"
        raise _not_regular(path, kind) from error
    _require_regular(path, status)


def _require_regular(path: str | Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _not_regular(path, _KINDS.get(stat.S_IFMT(status.st_mode), "a special file"))


def _not_regular(path: str | Path, found: str) -> CorruptFileError:
    return CorruptFileError(str(path), "a regular file", found, "Put the file itself there, or use another copy.")


_CHUNK_BYTES = 1 << 20


def read_chunks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a regular file in pieces of at most 1 MiB; the file itself must not be a link."""
    with open_regular_file(path, follow_links=False) as file:
        while chunk := disk.file_system.read(file.fileno(), _CHUNK_BYTES):
            yield chunk


# The SHA-256 of files by device, inode, size and time.
_digests: dict[tuple[int, int, int, int], str] = {}


def file_sha256(path: Path) -> str:
    """Read a regular file, and return its SHA-256 in hexadecimal; a link is an error."""
    status, digest = os.lstat(path), hashlib.sha256()
    for chunk in read_chunks(path):
        digest.update(chunk)
    _digests[_identity(status)] = digest.hexdigest()
    return digest.hexdigest()


def sha256_once(path: Path) -> str:
    """Return the SHA-256 of a regular file in hexadecimal; its bytes are read once per process.

    CorruptFileError: it is no regular file; links are not followed.
    """
    status = os.lstat(path)
    before = _digests.get(_identity(status)) if stat.S_ISREG(status.st_mode) else None
    return before or file_sha256(path)


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    """Return numbers that all links of a file share, and that change with its bytes."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def is_sha256(value: object) -> TypeGuard[str]:
    """Return whether a value has the form of a digest of `file_sha256`."""
    return type(value) is str and re.fullmatch(r"[0-9a-f]{64}", value) is not None


class DigestedFile:
    """A binary file, written from its beginning, that takes the digest meanwhile, so that it need not be read again."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._digest = hashlib.sha256()
        self.size_bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data` and return its length."""
        self._digest.update(data)
        self.size_bytes += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Flush the file: torch.save asks for it."""
        self._file.flush()

    def sha256(self) -> str:
        """Return the SHA-256 of the bytes written, in hexadecimal."""
        return self._digest.hexdigest()


def read_json_object(path: Path, next_step: str = "Restore it from a copy.") -> dict[str, Any]:
    """Read a JSON object from a regular file; CorruptFileError: it holds something else."""
    with open_regular_file(path) as file:
        return parse_json_object(file, path, next_step)


def parse_json_object(file: IO[bytes], path: Path, next_step: str = "Restore it from a copy.") -> dict[str, Any]:
    """Read a JSON object from an open file, which errors call `path`; CorruptFileError: it holds something else."""
    try:
        content = json.load(file)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(str(path), "a JSON object", repr(error)[:_MAX_SHOWN], next_step) from error
    if type(content) is not dict:
        raise CorruptFileError(str(path), "a JSON object", f"a {type(content).__name__}", next_step)
    return content


def sign_json(content: Mapping[str, Any]) -> bytes:
    """Write a JSON object as text that holds its own digest as `sha256`; dataclasses become objects of their fields.

    Examples:
        >>> text = sign_json({"size_bytes": 3})
        >>> is_signed(text, json.loads(text)), is_signed(text.replace(b"3", b"4"), json.loads(text))
        (True, False)
    """
    # dataclasses.asdict would copy all of a large manifest.
    text = json.dumps({**content, "sha256": ""}, sort_keys=True, indent=2, default=vars) + "\n"
    unsigned = _DEEP_LINE.sub("", text).encode()
    # Only the object's own keys are indented by two spaces. Making the text twice would take a tenth of a small save.
    return unsigned.replace(_signature(""), _signature(hashlib.sha256(unsigned).hexdigest()))


def is_signed(text: bytes, content: Mapping[str, Any]) -> bool:
    """Return whether a text is still the one that `sign_json` returned; `content` is the object read from it."""
    digest = content.get("sha256")
    return hashlib.sha256(text.replace(_signature(digest), _signature(""))).hexdigest() == digest


def _signature(digest: object) -> bytes:
    return f'\n  "sha256": "{digest}"'.encode()


TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


@contextlib.contextmanager
def open_zip(path: str | Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive for a block that only reads it; CorruptFileError: it is damaged, which the block may find."""
    with open_regular_file(path) as file, zip_in(file, path) as archive:
        yield archive


@contextlib.contextmanager
def zip_in(file: IO[bytes], path: str | Path) -> Iterator[zipfile.ZipFile]:
    """Read a zip archive from an open file, as `open_zip` does from the file at `path`, which errors name."""
    try:
        with zipfile.ZipFile(file) as archive:
            yield archive
    except Warning:
        raise
    except Exception as error:
        # On a damaged archive zipfile raises BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError,
        # OverflowError, struct.error, errors of zlib, bz2 and lzma, or EINVAL after a seek to a wrong place.
        # If reading fails, it raises BadZipFile while it handles the OSError.
        refusal = error if isinstance(error, OSError) else error.__context__
        if isinstance(refusal, OSError) and refusal.errno not in (None, errno.EINVAL):
            raise refusal from None
        fault = f"{type(error).__name__}: {error}"[:200]
        next_step = "Restore it from a copy, unless it was never a zip archive."
        raise CorruptFileError(str(path), "a whole zip archive", fault, next_step) from error


def check_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Read a member of an archive of torch.save and compare its checksum; BadZipFile: it differs.

    A checksum of zero is not compared: torch writes it if torch.serialization.set_crc32_options switched checksums off.
    """
    if not member.CRC:
        return
    # zipfile compares no checksum of a member without one. zlib-ng computes it 2 to 5 times as fast as zlib.
    unchecked, crc32 = copy.copy(member), 0
    del unchecked.CRC
    with archive.open(unchecked) as file:
        while data := file.read(_CHUNK_BYTES):
            crc32 = zlib_ng.crc32(data, crc32)
    if crc32 != member.CRC:
        raise zipfile.BadZipFile(f"Bad CRC-32 for file {member.filename!r}")


@contextlib.contextmanager
def open_pickle(path: str | Path) -> Iterator[IO[bytes]]:
    """Open the pickle of a torch.save file for a block that only reads it; reading its end compares the checksum."""
    with open_zip(path) as archive, pickle_in(archive) as pickled:
        yield pickled


@contextlib.contextmanager
def pickle_in(archive: zipfile.ZipFile) -> Iterator[IO[bytes]]:
    """Open the pickle in an archive of torch.save; BadZipFile: there is not exactly one."""
    pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise zipfile.BadZipFile(f"{len(pickles)} members called data.pkl")
    with archive.open(pickles[0]) as pickled:
        yield pickled


def is_torch_zip(path: str | Path) -> bool:
    """Return whether torch.load reads a file as a zip archive, and not as a bare pickle of torch before 1.6."""
    with open_regular_file(path) as file:
        return begins_like_zip(file)


def begins_like_zip(file: IO[bytes]) -> bool:
    """Return whether the next bytes of an open file are those with which zip archives of torch.save begin."""
    return file.read(4) == b"PK\x03\x04"


def is_torch_file(path: Path) -> bool:
    """Return whether a path is a file whose name ends as names of torch.save files do."""
    return path.suffix in TORCH_SUFFIXES and path.is_file()


def is_safe_name(name: str) -> bool:
    """Return whether a relative file name with `/` as separator stays inside its directory on every system.

    A name with half of a surrogate pair is refused: JSON can hold it, but no file system can.

    Examples:
        >>> is_safe_name("sub/model.safetensors"), is_safe_name("../model.safetensors")
        (True, False)
    """
    segments = name.split("/")
    unsafe = re.compile(r"[\\:\x00-\x1f\ud800-\udfff]")
    return all(segment not in ("", ".", "..") and not unsafe.search(segment) for segment in segments)
