"""Shared by the lossy codecs: whole numbers ("levels") of few bits, and the elements they leave out.

Each element has a level q, or is the *same* as its prediction, or is *exact*, stored as it is. Two payloads:

| payload | content |
|---|---|
| 0 | the levels: 3n + 2 blocks (see `entropy`) for n tiles |
| 1 | the exact elements, row-major, in the tensor's dtype |

The tensor is viewed as a matrix [R, C], split between the two dimensions that make it most square, and cut into
tiles of at most 2**16 elements: 2**16 // C whole rows, or 2**16 columns of a longer row. If there is more than one
tile and C >= 128, its rows are coded in the order of their classes, which rise from 0 to 7 with the size of a row's
levels, and within a class in their own order: a tile has one Huffman code, so its rows should be alike.

| block | content |
|---|---|
| 3i | the symbols of tile i, of w bits; if w > 8 only their highest 8 bits |
| 3i + 1 | if w > 8 the lowest w - 8 bits of each symbol, one byte each, else empty |
| 3i + 2 | int16, for each escape of the tile its level, -32768 for the same or 32767 for exact; all low bytes first |
| 3n | w of each tile, one byte each: 2, 4, 8, 10, 12, 14 or 16, whatever it needs |
| 3n + 1 | the class of each row, one byte each; empty if there are none |

Symbols, with c = 2 ** (w - 1):

| symbol, w > 2 | w = 2 | meaning |
|---|---|---|
| 0 | | same |
| 1 ... 2c - 2 | 0, 1, 2 | level = symbol - c; if w is 2, symbol - 1 |
| 2c - 1 | 3 | an escape |

Symbols of 2 or 4 bits are packed four or two to a byte, the first quarter or half of the tile in the lowest bits: a
Huffman code cannot use less than one bit a byte, and is wasteful near that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import Codec
from hf_trainweights.checkpoint.codecs.coding import compiled
from hf_trainweights.checkpoint.codecs.coding.float_tiles import moved_from
from hf_trainweights.checkpoint.codecs.coding.matrix import TILE, Tile, matrix_shape, tiles
from hf_trainweights.checkpoint.codecs.coding.symbols import EXACT, SAME, decode_levels, encode_levels


def work_tiles(R: int, C: int) -> Iterator[Tile]:
    """Yield the tiles of a matrix that are worked on at once, in row-major order; files do not depend on their size."""
    return tiles(R, C, compiled.TILE if compiled.is_available() else TILE)


def clip_(levels: np.ndarray) -> None:
    """Bring levels into the range that can be stored, in place; one that changes decodes wrong, so is exact."""
    np.clip(levels, np.float32(SAME + 1), np.float32(EXACT - 1), out=levels)


class LevelWriter:
    """Collects the levels of a matrix [R, C], tile by tile in the order of `work_tiles`."""

    def __init__(self, R: int, C: int):
        self._levels = np.empty((R, C), np.int16)
        self._row_sizes = np.zeros(R)
        self._exact: list[Tensor] = []

    def write(
        self,
        tile: Tile,
        levels: np.ndarray,
        elements: Tensor,
        exact: Tensor | None,
        same: np.ndarray | None = None,
    ) -> None:
        """Add one tile: levels float32 [r, c] from `clip_`, 0 where an element equals its prediction.

        Levels are overwritten. `exact` are positions of elements to store as they are, int64 [m]; `same` is true where
        an element equals its prediction.
        """
        stored = self._levels[tile]
        np.copyto(stored, levels, casting="unsafe")
        if same is not None:
            # One more than the largest wraps around to the smallest.
            np.minimum(stored, np.add(same, np.int16(EXACT), dtype=np.int16), out=stored)
        if exact is not None:
            positions = exact.numpy()
            levels.reshape(-1)[positions] = 0
            stored.reshape(-1)[positions] = EXACT
            self._exact.append(elements.reshape(-1)[exact])
        self._row_sizes[tile[0]] += np.abs(levels, out=levels).sum(1, dtype=np.float64)

    def place(self, tile: Tile) -> tuple[np.ndarray, np.ndarray]:
        """Return views to fill: a tile's levels, int16 [r, c], and its rows' sums of magnitudes, float64 [r].

        `SAME` and `EXACT` stand among the levels and do not count in the sums, which are added to.
        """
        return self._levels[tile], self._row_sizes[tile[0]]

    def keep_exact(self, tile: Tile, elements: Tensor) -> None:
        """Keep those of the tile's elements whose levels, in their place, are `EXACT`."""
        self._exact.append(elements.reshape(-1)[_positions(self._levels[tile])])

    def mark_exact(self, tile: Tile, elements: Tensor, positions: Tensor) -> None:
        """Store the elements [r, c] of a tile at these positions, int64 [m], exactly; `EXACT` replaces their levels."""
        levels, row_sizes = self.place(tile)
        at = positions.numpy()
        marked = levels.reshape(-1)[at]
        np.subtract.at(row_sizes, at // levels.shape[1], np.abs(marked.astype(np.float64)) * (marked != SAME))
        levels.reshape(-1)[at] = EXACT
        self._exact.append(elements.reshape(-1)[positions])

    def payloads(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the two payloads, given the tensor's dtype."""
        exact = torch.cat([torch.empty(0, dtype=dtype), *self._exact])
        return [encode_levels(self._levels, self._row_sizes), exact.view(torch.uint8)]


@dataclass(frozen=True)
class Levels:
    """The levels of one tile, read back.

    Args:
        stored: int16 [r, c]; -32768 where the element equals its prediction.
        exact: int64 [m], positions of elements stored as they are; None: none.
        elements: [m], those elements.
    """

    stored: np.ndarray
    exact: Tensor | None
    elements: Tensor

    @cached_property
    def same(self) -> np.ndarray | None:
        """Bool [r, c], true where the element equals its prediction; None: nowhere."""
        return self.stored == SAME if self.stored.min() == SAME else None

    def write_to(self, out: np.ndarray) -> None:
        """Write the levels to `out`, float32 [r, c], 0 where the element equals its prediction."""
        if self.same is None:
            np.copyto(out, self.stored)
        else:
            np.multiply(self.stored, moved_from(self.same), out=out)


def put(decoded: np.ndarray, out: Tensor, exact: Tensor | None, elements: Tensor | None) -> None:
    """Complete the contiguous tile `out` [r, c], which was decoded in the memory that `work_in(out)` returned."""
    if out.dtype != torch.float32:
        out.copy_(torch.from_numpy(decoded))
    if exact is not None and elements is not None:
        out.view(-1)[exact] = elements


def read_levels(
    codec: type[Codec], payloads: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype
) -> Iterator[tuple[Tile, Levels]]:
    """Yield the levels that a `LevelWriter` collected, tile by tile in the order of `work_tiles`.

    CorruptFileError: they do not fit the shape; all are decoded by then, so it is safe to allocate the tensor.
    """
    levels, exact_count = decode_levels(codec, payloads[0], *matrix_shape(shape))
    if payloads[1].numel() % dtype.itemsize:
        raise codec.corrupt("payload 1", f"elements of {dtype.itemsize} bytes", f"{payloads[1].numel()} bytes")
    elements = payloads[1].clone().view(dtype)
    if exact_count != len(elements):
        raise codec.corrupt("payload 1", f"{exact_count} elements", f"{len(elements)}")
    return _split_levels(levels, elements)


def _split_levels(levels: np.ndarray, elements: Tensor) -> Iterator[tuple[Tile, Levels]]:
    for tile in work_tiles(*levels.shape):
        exact = _positions(levels[tile]) if len(elements) else None
        count = 0 if exact is None else len(exact)
        yield tile, Levels(levels[tile], exact, elements[:count])
        elements = elements[count:]


def _positions(levels: np.ndarray) -> Tensor:
    """Return where levels of a tile are `EXACT`, int64 [m], positions in the flattened tile."""
    if compiled.is_available():
        return torch.from_numpy(compiled.find_exact(levels).copy())
    return torch.from_numpy(np.flatnonzero(levels == EXACT) if levels.max() == EXACT else np.empty(0, np.int64))
