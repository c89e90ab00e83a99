"""Memory that costs little to touch: the first write to a fresh page takes longer than most of the arithmetic on it."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised contiguous CPU tensor to decode into.

    It is allocated by numpy, which asks Linux for huge pages: the first touch of a large tensor of small pages can
    take as long as decoding it.
    """
    buffer = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
    if not len(buffer):
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(buffer).view(dtype).view(shape)


class ByteBuffer:
    """Bytes that others are appended to.

    Args:
        expected_bytes: Memory is set aside for so many, and more as it is needed; none of it is touched before.
    """

    def __init__(self, expected_bytes: int = 0):
        self._memory = np.empty(expected_bytes, np.uint8)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, data: np.ndarray) -> None:
        """Append a copy of a 1-D uint8 array."""
        start, self._length = self._length, self._length + len(data)
        if self._length > len(self._memory):
            grown = np.empty(max(2 * start, self._length), np.uint8)
            grown[:start] = self._memory[:start]
            self._memory = grown
        self._memory[start : self._length] = data

    def view(self) -> np.ndarray:
        """Return all that was appended, uint8; a view."""
        return self._memory[: self._length]


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[str, np.ndarray] = {}


_scratch = _Scratch()


def scratch(use: str, shape: Sequence[int], dtype: DTypeLike = np.float32) -> np.ndarray:
    """Return uninitialised, contiguous memory, valid until the next call for the same use in this thread.

    Each use has a buffer of its own, which grows to the largest shape and stays.
    """
    size_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    buffer = _scratch.buffers.get(use)
    if buffer is None or len(buffer) < size_bytes:
        buffer = _scratch.buffers[use] = np.empty(size_bytes, np.uint8)
    return buffer[:size_bytes].view(dtype).reshape(shape)
