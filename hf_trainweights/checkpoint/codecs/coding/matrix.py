"""A tensor viewed as a matrix, and the matrix cut into tiles that are worked on one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import torch

Tile = tuple[slice, slice]
"""Rows and columns of a matrix that are contiguous in memory."""

TILE = 1 << 17
"""Most elements of a tile for arithmetic: fewer are slower for the number of calls, more for the cache."""


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
