"""Levels of a matrix <-> one payload of symbols; levels.py specifies both, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import Codec
from hf_trainweights.checkpoint.codecs.coding import compiled
from hf_trainweights.checkpoint.codecs.coding.entropy import BlockReader, BlockWriter, bytes_to_int16, int16_to_bytes
from hf_trainweights.checkpoint.codecs.coding.matrix import tile_count, tiles

SAME, EXACT = -(2**15), 2**15 - 1
"""The levels that stand for an element equal to its prediction, and for one that is stored as it is."""

# A row's class costs at most 3 bits and saves about 1/12 bit an element.
_SHORTEST_CLASSED_ROW = 128
_CLASSES = 8
# An escape costs 3 to 16 bits, a narrower symbol saves 1/8 bit or more; best on weights and moments of two models.
_ESCAPES_PER_TILE = 1 / 64
_WIDTH_SAMPLE = 4096
_WIDTHS = (2, 4, 8, 10, 12, 14, 16)


def encode_levels(levels: np.ndarray, row_sizes: np.ndarray) -> Tensor:
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


def decode_levels(codec: type[Codec], payload: Tensor, R: int, C: int) -> tuple[np.ndarray, int]:
    """Undo `encode_levels`: return the levels, int16 [R, C], and how many elements are exact.

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
