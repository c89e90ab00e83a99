"""`MemoryFile`: an array as a binary file, whose bytes are copied while other threads run."""

from __future__ import annotations

import io
from typing import Any

import numpy as np


class MemoryFile(io.RawIOBase):
    """A 1-D uint8 array as a file that keeps its length.

    BytesIO holds Python's lock while it copies, a second for each GiB, in which training stands still.
    """

    def __init__(self, memory: np.ndarray):
        self._memory, self._position = memory, 0

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place, which may lie beyond the last byte, and return it."""
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._memory)}[whence]
        if position < 0:
            raise ValueError(f"negative position {position}")
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as there are bytes, and return how many there were."""
        found = self._memory[self._position : self._position + len(buffer)]
        np.frombuffer(buffer, np.uint8)[: len(found)] = found
        self._position += len(found)
        return len(found)

    def write(self, data: Any) -> int:
        """Put bytes into the place of others, and return how many; ValueError: they reach beyond the last one."""
        self._memory[self._position : self._position + len(data)] = np.frombuffer(data, np.uint8)
        self._position += len(data)
        return len(data)
