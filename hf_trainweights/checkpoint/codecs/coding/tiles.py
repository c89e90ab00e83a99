"""A tensor viewed as a matrix, cut into tiles, and float32 arithmetic on one tile after the other in the same memory.

It uses numpy, whose calls take a third as long as torch's; both round every operation once. The first write to a fresh
page takes longer than most of the arithmetic on it, so memory is reused, or asked for in huge pages.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

Tile = tuple[slice, slice]
"""Rows and columns of a matrix that are contiguous in memory."""

TILE = 1 << 20
"""Most elements of a tile for arithmetic; files do not depend on it."""


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Return the shape [R, C] of the matrix that a tensor is viewed as; [0, 1] for an empty one."""
    count = shape.numel()
    if count == 0:
        return 0, 1
    splits = [shape[:dims].numel() for dims in range(1, len(shape))] or [1]
    return min(((rows, count // rows) for rows in splits), key=max)


def tiles(R: int, C: int, size: int = TILE) -> Iterator[Tile]:
    """Yield tiles of at most `size` elements that make up a matrix, in row-major order."""
    height = max(size // C, 1)
    for row in range(0, R, height):
        for column in range(0, C, size):
            yield slice(row, min(row + height, R)), slice(column, min(column + size, C))


def tile_count(R: int, C: int, size: int) -> int:
    """Return how many tiles `tiles` yields."""
    return -(-R // max(size // C, 1)) * -(-C // size)


def work_in(out: Tensor, use: str) -> np.ndarray:
    """Return float32 memory in which the tile `out` [r, c] is computed: its own, or scratch if it has another dtype."""
    return out.numpy() if out.dtype == torch.float32 else scratch(use, out.shape)


def to_float32(elements: Tensor, use: str) -> np.ndarray:
    """Return the elements of a tile as float32 [r, c]: a view, or scratch if they have another dtype."""
    values = work_in(elements, use)
    if elements.dtype != torch.float32:
        torch.from_numpy(values).copy_(elements)
    return values


def rounded_to(dtype: torch.dtype, values: np.ndarray) -> np.ndarray:
    """Return float32 values rounded to what `dtype` can hold."""
    return torch.from_numpy(values).to(dtype).to(torch.float32).numpy()


def put(decoded: np.ndarray, out: Tensor) -> None:
    """Complete the contiguous tile `out` [r, c], which was decoded in the memory that `work_in(out)` returned."""
    if out.dtype != torch.float32:
        out.copy_(torch.from_numpy(decoded))


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised contiguous CPU tensor to decode into.

    It is allocated by numpy, which asks Linux for huge pages: the first touch of a large tensor of small pages can
    take as long as decoding it.
    """
    buffer = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
    if not len(buffer):
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(buffer).view(dtype).view(shape)


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
