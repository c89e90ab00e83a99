"""SHA-256 of files: of one that lies on the disk, and of one that is being written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hf_trainweights.files import disk
from hf_trainweights.files.regular_files import open_regular_file

_CHUNK_BYTES = 1 << 20


def read_chunks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a regular file in pieces of at most 1 MiB, never following a link in its last component."""
    with open_regular_file(path, follow_links=False) as file:
        while chunk := disk.file_system.read(file.fileno(), _CHUNK_BYTES):
            yield chunk


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a regular file, in hexadecimal; a link is an error."""
    digest = hashlib.sha256()
    for chunk in read_chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


class DigestedFile:
    """A binary file, written from its beginning, and the digest of what was written, so that nobody has to read it."""

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
        """Return the SHA-256 of what was written, in hexadecimal."""
        return self._digest.hexdigest()
