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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import Codec
from hf_trainweights.checkpoint.codecs.coding import compiled
from hf_trainweights.checkpoint.codecs.coding.entropy import BlockReader, BlockWriter, bytes_to_int16, int16_to_bytes
from hf_trainweights.checkpoint.codecs.coding.tiles import TILE, Tile, matrix_shape, moved_from, tile_count, tiles

SAME, EXACT = -(2**15), 2**15 - 1
"""The levels that stand for an element equal to its prediction, and for one that is stored as it is."""

# A row's class costs at most 3 bits and saves about 1/12 bit an element.
_SHORTEST_CLASSED_ROW = 128
_CLASSES = 8
# An escape costs 3 to 16 bits, a narrower symbol saves 1/8 bit or more; best on weights and moments of two models.
_ESCAPES_PER_TILE = 1 / 64
_WIDTH_SAMPLE = 4096
_WIDTHS = (2, 4, 8, 10, 12, 14, 16)


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
        return [_encode_levels(self._levels, self._row_sizes), exact.view(torch.uint8)]


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
    levels, exact_count = _decode_levels(codec, payloads[0], *matrix_shape(shape))
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


def _encode_levels(levels: np.ndarray, row_sizes: np.ndarray) -> Tensor:
    """Return the payload, 1-D uint8, of levels int16 [R, C], `SAME` and `EXACT` among them.

    `row_sizes`, float64 [R], the sums of the sizes of a row's levels, decide which rows are coded together.
    """
    R, C = levels.shape
    classes = _row_classes(row_sizes) if _has_classes(R, C) else np.empty(0, np.uint8)
    blocks = BlockWriter()
    widths: list[int] = []
    for width, high, low, escapes in _pack_tiles(levels, classes):
        widths.append(width)
        for block in (high, low, int16_to_bytes(escapes)):
            blocks.write(block)
    blocks.write(np.array(widths, np.uint8))
    blocks.write(classes)
    return blocks.payload()


def _decode_levels(codec: type[Codec], payload: Tensor, R: int, C: int) -> tuple[np.ndarray, int]:
    """Undo `_encode_levels`: return the levels, int16 [R, C], and how many elements are exact.

    CorruptFileError: the payload is damaged or does not fit the shape.
    """
    count = tile_count(R, C, compiled.CODED_TILE)
    blocks = BlockReader(codec, payload, 3 * count + 2)
    widths = blocks.read(3 * count, count).tolist()
    if not set(widths) <= set(_WIDTHS):
        raise codec.corrupt("widths of symbols", ", ".join(map(str, _WIDTHS)), str(sorted(set(widths)))[:80])
    classes = blocks.read(3 * count + 1, R if _has_classes(R, C) else 0)
    levels = np.empty((R, C), np.int16)
    exact_count = 0
    for number, (index, shape) in enumerate(_coded_tiles(classes, R, C)):
        width, elements = widths[number], shape[0] * shape[1]
        high = blocks.read(3 * number, _packed_bytes(elements, width))
        low = blocks.read(3 * number + 1, elements if width > 8 else 0)
        tile, escape_count, put_escapes = _unpack_levels(high, low, width, elements)
        escapes = blocks.read(3 * number + 2, 2 * escape_count)
        if escape_count:
            exact_count += put_escapes(escapes)
        levels[index] = tile.reshape(shape)
    return levels, exact_count


def _pack_tiles(levels: np.ndarray, classes: np.ndarray) -> Iterator[compiled.Packed]:
    """Yield of each tile the width, the first two blocks, and the levels of its escapes."""
    R, C = levels.shape
    if compiled.is_available():
        order = classes.argsort(kind="stable") if len(classes) else None
        packed = compiled.pack_tiles(levels, order, tile_count(R, C, compiled.CODED_TILE))
        for (rows, columns), (width, high, low, escapes) in zip(tiles(R, C, compiled.CODED_TILE), packed, strict=True):
            count = (rows.stop - rows.start) * (columns.stop - columns.start)
            yield width, high[: _packed_bytes(count, width)], low[: count if width > 8 else 0], escapes
        return
    for index, _ in _coded_tiles(classes, R, C):
        tile = levels[index].reshape(-1)
        width = _choose_width(tile)
        symbols, escapes = _to_symbols(tile, width)
        yield width, *_pack(symbols, width), escapes


def _coded_tiles(
    classes: np.ndarray, R: int, C: int
) -> Iterator[tuple[tuple[slice | np.ndarray, slice], tuple[int, int]]]:
    """Yield numpy index and shape of each tile in the order they are coded."""
    order = classes.argsort(kind="stable") if len(classes) else None
    for rows, columns in tiles(R, C, compiled.CODED_TILE):
        shape = rows.stop - rows.start, columns.stop - columns.start
        yield (rows if order is None else order[rows], columns), shape


def _has_classes(R: int, C: int) -> bool:
    return C >= _SHORTEST_CLASSED_ROW and R * C > compiled.CODED_TILE


def _row_classes(sizes: np.ndarray) -> np.ndarray:
    """Return uint8 [R]: 0 for rows of zeros and the same, 1 to 7 for equal numbers of the others."""
    positive = np.sort(sizes[sizes > 0])
    lowest = positive[np.arange(_CLASSES - 1) * len(positive) // (_CLASSES - 1)] if len(positive) else positive
    return np.searchsorted(lowest, sizes, side="right").astype(np.uint8)


def _choose_width(levels: np.ndarray) -> int:
    """Return the narrowest width that fits nearly all levels of a sample."""
    sample = levels[:: len(levels) // _WIDTH_SAMPLE + 1].copy()
    has_same = sample.min() == SAME
    for width in _WIDTHS[:-1]:
        if np.count_nonzero(_escaped(sample, width, has_same)) <= _ESCAPES_PER_TILE * len(sample):
            return width
    return _WIDTHS[-1]


def _range(width: int) -> tuple[int, int, int]:
    """Return the lowest and the highest level that a width holds, and by how much its symbols are larger."""
    offset = 1 if width == 2 else 1 << (width - 1)
    return (-1 if width == 2 else 1 - offset), (1 << width) - 2 - offset, offset


def _escaped(levels: np.ndarray, width: int, has_same: bool) -> np.ndarray:
    """Return bool, true where a level has no symbol; `has_same` says whether one is the same."""
    lowest, highest, _ = _range(width)
    # What is below the lowest wraps around.
    outside = levels.view(np.uint16) - np.uint16(lowest & 0xFFFF) > np.uint16(highest - lowest)
    if has_same and width > 2:
        outside &= levels != SAME
    return outside


def _unpack_levels(
    high: np.ndarray, low: np.ndarray, width: int, count: int
) -> tuple[np.ndarray, int, Callable[[np.ndarray], int]]:
    """Return a tile's levels but for its escapes, how many these are, and a function that puts them in their places.

    Levels are int16 [count], which the function writes to; it takes escapes as stored, and returns how many are exact.
    """
    if compiled.is_available():
        levels, escape_count = compiled.unpack_levels(high, low, width, count)
        return levels, escape_count, lambda escapes: compiled.put_escapes(escapes, width, levels)
    symbols = _unpack(high, low, width, count)
    levels = _to_levels(symbols, width)
    escape = (1 << width) - 1
    escaped = np.flatnonzero(symbols == escape) if symbols.max() == escape else symbols[:0]

    def put_escapes(escapes: np.ndarray) -> int:
        levels[escaped] = bytes_to_int16(escapes)
        return int(np.count_nonzero(levels[escaped] == EXACT))

    return levels, len(escaped), put_escapes


def _to_symbols(levels: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the symbols, uint8 or of more than 8 bits uint16, and the levels of the escapes."""
    lowest, highest, offset = _range(width)
    smallest = levels.min()
    has_same = bool(smallest == SAME)
    # The same, which is below every level, becomes 0; the escapes are overwritten below.
    fitting = np.clip(levels, np.int16(lowest - 1), np.int16(EXACT)) if has_same else levels
    symbols = fitting.astype(_symbol_dtype(width))
    symbols += symbols.dtype.type(offset)
    if smallest >= lowest and levels.max() <= highest:
        return symbols, levels[:0]
    escaped = np.flatnonzero(_escaped(levels, width, has_same))
    symbols[escaped] = (1 << width) - 1
    return symbols, levels[escaped]


def _symbol_dtype(width: int) -> type[np.uint8] | type[np.uint16]:
    return np.uint8 if width <= 8 else np.uint16


def _to_levels(symbols: np.ndarray, width: int) -> np.ndarray:
    """Undo `_to_symbols`, but for the escapes."""
    offset = _range(width)[2]
    levels = np.subtract(symbols, np.uint16(offset), dtype=np.uint16).view(np.int16)
    if width > 2 and symbols.min() == 0:
        levels += (symbols == 0) * np.int16(SAME + offset)
    return levels


def _pack(symbols: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first two blocks of a tile."""
    if width > 8:
        low = symbols & np.uint16((1 << (width - 8)) - 1)
        return (symbols >> (width - 8)).astype(np.uint8), low.astype(np.uint8)
    size = _packed_bytes(len(symbols), width)
    packed = symbols[:size]
    for part in range(1, 8 // width):
        later = symbols[part * size : (part + 1) * size]
        packed[: len(later)] += later * np.uint8(1 << (part * width))  # in numpy 2.4 six times as fast as a shift
    return packed, symbols[:0]


def _unpack(high: np.ndarray, low: np.ndarray, width: int, count: int) -> np.ndarray:
    """Undo `_pack`."""
    if width > 8:
        return high.astype(np.uint16) * np.uint16(1 << (width - 8)) + low
    if width == 8:
        return high
    symbols = np.empty((8 // width, len(high)), np.uint8)
    for part, row in enumerate(symbols):
        np.right_shift(high, np.uint8(part * width), out=row)
    symbols &= np.uint8((1 << width) - 1)
    return symbols.reshape(-1)[:count]


def _packed_bytes(count: int, width: int) -> int:
    return -(-count // (8 // width)) if width < 8 else count
