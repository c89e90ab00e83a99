"""The zip archives that torch.load reads: a writer, which never seeks in the file, and a file in memory.

Records are stored without compression. The checksum and length of a record follow it, as in the archives of torch.save,
so that a record may grow while it is written.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from zlib_ng import zlib_ng

# The offset of the first record's bytes, if its name is that of a payload, `data/0`.
FIRST_RECORD_START = 64

_ARCHIVE = "archive/"
# Bit 3: checksum and lengths follow the data. Bit 11: names are UTF-8.
_FLAGS = 1 << 3 | 1 << 11
_ZIP64_VERSION = 45
_UNIX_ZIP64 = 3 << 8 | _ZIP64_VERSION
_MIDNIGHT, _FIRST_OF_1980 = 0, 1 << 5 | 1
_UNKNOWN_16, _UNKNOWN_32 = 0xFFFF, 0xFFFFFFFF


class Writable(Protocol):
    """A file that records are written to."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Write all of `data`."""
        ...


@dataclass(frozen=True)
class _Record:
    name: bytes
    start: int
    crc32: int
    size_bytes: int


class TorchZipWriter:
    """Writes one archive to a binary file, from its beginning on."""

    def __init__(self, file: Writable):
        self._file = file
        self._position = 0
        self._records: list[_Record] = []
        self._name, self._start = b"", 0
        self._crc32 = self._size_bytes = 0

    def begin(self, name: str) -> None:
        """Begin a record: the bytes of all calls of `write` up to `end`."""
        self._name, self._start = (_ARCHIVE + name).encode(), self._position
        self._crc32 = self._size_bytes = 0
        # An extra field has room for lengths of 64 bits, which the record may need.
        sizes = struct.pack("<HHQQ", 1, 16, 0, 0)
        header = struct.pack(
            "<4s5H3I2H",
            *(b"PK\3\4", _ZIP64_VERSION, _FLAGS, 0, _MIDNIGHT, _FIRST_OF_1980),
            *(0, _UNKNOWN_32, _UNKNOWN_32, len(self._name), len(sizes)),
        )
        self._put(header + self._name + sizes)

    def write(self, data: bytes | memoryview, crc32: int | None = None) -> None:
        """Append bytes to the record; the caller may pass their checksum if it knows it."""
        crc32 = zlib_ng.crc32(data) if crc32 is None else crc32
        self._crc32 = zlib_ng.crc32_combine(self._crc32, crc32, len(data))
        self._size_bytes += len(data)
        self._put(data)

    def end(self) -> None:
        """Write the checksum and length of the record, which is complete then."""
        self._records.append(_Record(self._name, self._start, self._crc32, self._size_bytes))
        self._put(struct.pack("<4sIQQ", b"PK\7\10", self._crc32, self._size_bytes, self._size_bytes))

    def add(self, name: str, data: bytes) -> None:
        """Write a record of these bytes."""
        self.begin(name)
        self.write(data)
        self.end()

    def finish(self) -> None:
        """Write the directory of the records, which completes the archive; the file stays open."""
        start, count = self._position, len(self._records)
        for record in self._records:
            self._put(_directory_entry(record))
        size_bytes, end = self._position - start, self._position
        versions = _UNIX_ZIP64, _ZIP64_VERSION
        self._put(struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, *versions, 0, 0, count, count, size_bytes, start))
        self._put(struct.pack("<4sIQI", b"PK\6\7", 0, end, 1))
        few = min(count, _UNKNOWN_16)
        places = min(size_bytes, _UNKNOWN_32), min(start, _UNKNOWN_32)
        self._put(struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, few, few, *places, 0))

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._position += len(data)


def _directory_entry(record: _Record) -> bytes:
    """Return the entry of a record in the directory; an extra field has its numbers beyond 32 bits."""
    large = [number for number in (record.size_bytes, record.size_bytes, record.start) if number >= _UNKNOWN_32]
    extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    size_bytes, start = min(record.size_bytes, _UNKNOWN_32), min(record.start, _UNKNOWN_32)
    entry = struct.pack(
        "<4s6H3I5H2I",
        *(b"PK\1\2", _UNIX_ZIP64, _ZIP64_VERSION, _FLAGS, 0, _MIDNIGHT, _FIRST_OF_1980),
        *(record.crc32, size_bytes, size_bytes, len(record.name), len(extra), 0, 0, 0, 0, start),
    )
    return entry + record.name + extra


class MemoryFile(io.RawIOBase):
    """A 1-D uint8 array as a file of fixed length.

    BytesIO is no substitute: it holds Python's lock while it copies, a second for each GiB, and training waits.
    """

    def __init__(self, memory: np.ndarray):
        self._memory, self._position = memory, 0

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position, which may lie beyond the last byte, and return it."""
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._memory)}[whence]
        if position < 0:
            raise ValueError(f"negative position {position}")
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as there are bytes, and return the number of bytes read."""
        data = self._memory[self._position : self._position + len(buffer)]
        np.frombuffer(buffer, np.uint8)[: len(data)] = data
        self._position += len(data)
        return len(data)

    def write(self, data: Any) -> int:
        """Overwrite bytes and return their number; ValueError: they reach beyond the end of the array."""
        self._memory[self._position : self._position + len(data)] = np.frombuffer(data, np.uint8)
        self._position += len(data)
        return len(data)
