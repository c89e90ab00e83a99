"""Stores the levels that the lossy codecs round elements to, and the few elements that are stored as they are.

A lossy codec predicts each element, divides the difference to the prediction by a step, and rounds the result to an
integer, the *level* q, from -32767 to 32766. The level has no unit: it counts steps. Prediction and step are the
codec's own (see there). Two kinds of elements have no level. An element is *same* if it equals its prediction. It is
*exact*, stored as it is, if decoding its level would miss the codec's limit of the error. There are two payloads:

| payload | content |
|---|---|
| 0 | the levels: 3n + 2 blocks (see `blocks`) for n tiles |
| 1 | the exact elements, row-major, in the tensor's dtype |

The tensor is viewed as a matrix [R, C], split after the first dimensions that make max(R, C) smallest, a vector as one
row. It is cut into tiles of at most 2**16 elements: 2**16 // C unbroken rows, or 2**16 columns of a longer row.

A tile has one Huffman code, so its rows should be alike. If there is more than one tile and C >= 128, each row has a
class from 0 to 7, which rises with the magnitudes of the row's levels. Rows are coded in the order of their classes,
and within a class in their own order. Each element becomes a *symbol* of w bits, and w is chosen for each tile. Levels
too large for w bits, exact elements, and if w is 2 same ones share one symbol, the *escape*, and are stored apart.

| block | content |
|---|---|
| 3i | the symbols of tile i, w bits each; if w > 8 only their highest 8 bits |
| 3i + 1 | if w > 8 the lowest w - 8 bits of each symbol, one byte each, else empty |
| 3i + 2 | int16, one per escape of the tile: its level, -32768 for same, 32767 for exact; all low bytes first |
| 3n | w of each tile, one byte each: 2, 4, 8, 10, 12, 14 or 16, whichever the tile needs |
| 3n + 1 | the class of each row, one byte each; empty if rows are in their own order |

Symbols, with c = 2 ** (w - 1):

| symbol, w > 2 | w = 2 | meaning |
|---|---|---|
| 0 | | same |
| 1 ... 2c - 2 | 0, 1, 2 | level = symbol - c; if w is 2, symbol - 1 |
| 2c - 1 | 3 | an escape |

Symbols of 2 or 4 bits are packed four or two to a byte, because a Huffman code cannot use less than one bit a byte and
is wasteful near that. The first quarter or half of the tile, rounded up, is in the lowest bits: symbol k is in byte
k mod b of the b bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import Codec
from hf_trainweights.checkpoint.codecs.coding import compiled
from hf_trainweights.checkpoint.codecs.coding.blocks import (
    BlockReader,
    BlockWriter,
    Placed,
    Rows,
    Tile,
    bytes_to_int16,
    empty,
    int16_to_bytes,
    matrix_shape,
    rows_of,
    scratch,
    tile_count,
    tiles,
)

SAME, EXACT = -(2**15), 2**15 - 1
"""Numbers in arrays of levels that are no levels: the element equals its prediction, or is stored as it is."""

# Most levels of a tile, which are coded together; `TILE` in native/symbols.c.
_CODED_TILE = 1 << 16
# Tiles that one call of native/symbols.c packs.
_PACKED_TILES = 16
# Shorter rows have no class: it costs at most 3 bits a row and saves about 1/12 bit an element.
_SHORTEST_CLASSED_ROW = 128
_CLASSES = 8
# A tile takes the narrowest symbols that leave at most one escape among this many levels. An escape costs 3 to 16 bits,
# a narrower symbol saves 1/8 bit or more. 64 gave the smallest files for weights and moments of two models.
_LEVELS_PER_ESCAPE = 64
# The width is chosen by about this many levels of a tile.
_WIDTH_SAMPLE = 4096
_WIDTHS = (2, 4, 8, 10, 12, 14, 16)


class LevelWriter:
    """Collects the levels of a contiguous CPU tensor, one of its `tiles` after the other, and codes them at the end.

    `bound` is the largest error so far of an element that is not exact, in the unit of the codec's errors.
    """

    def __init__(self, tensor: Tensor):
        self._elements = tensor.view(matrix_shape(tensor.shape))
        self._levels = np.empty(self._elements.shape, np.int16)
        self._row_sizes = np.zeros(len(self._elements))
        self._exact = [torch.empty(0, dtype=tensor.dtype)]
        self.bound = 0.0

    def write(self, tile: Tile, encode: Callable[[Tensor, np.ndarray, np.ndarray], tuple[int, float]]) -> None:
        """Let `encode(elements, levels, row_sizes)` find the levels of the next tile.

        `encode` fills `levels`, int16 [r, c], in which `SAME` and `EXACT` may stand, and adds the magnitudes of each
        row's other levels to `row_sizes`, float64 [r]. It returns, like `place_levels`, the number of exact elements
        and the largest error of the others.
        """
        elements, levels = self._elements[tile], self._levels[tile]
        exact_count, largest_error = encode(elements, levels, self._row_sizes[tile[0]])
        if exact_count:
            self._exact.append(elements.reshape(-1)[np.flatnonzero(levels == EXACT)])
        self.bound = max(self.bound, largest_error)

    def payloads(self) -> list[Tensor]:
        """Return the two payloads, after the last tile."""
        classes = _row_classes(self._row_sizes) if _has_classes(*self._levels.shape) else np.empty(0, np.uint8)
        order = classes.argsort(kind="stable") if len(classes) else None
        blocks = BlockWriter(self._levels.size)
        widths: list[int] = []
        for width, high, low, escapes in _pack_tiles(self._levels, order):
            widths.append(width)
            for block in (high, low, int16_to_bytes(escapes)):
                blocks.write(block)
        blocks.write(np.array(widths, np.uint8))
        blocks.write(classes)
        return [blocks.payload(), torch.cat(self._exact).view(torch.uint8)]


def to_levels(numbers: np.ndarray) -> np.ndarray:
    """Round float32 numbers, NaN too, to levels. Those out of range are clipped: they decode wrong and become exact."""
    return np.minimum(np.fmax(np.rint(numbers), SAME + 1), EXACT - 1)


def place_levels(
    numbers: np.ndarray,
    same: np.ndarray,
    errors: np.ndarray,
    limit: float,
    levels: np.ndarray,
    row_sizes: np.ndarray,
) -> tuple[int, float]:
    """Fill the levels of a tile, int16 [r, c]; return the number of exact elements and the largest error of the others.

    `numbers` are the levels as `to_levels` returned them. `same` tells of each element whether it equals its prediction
    and becomes `SAME`. An element becomes `EXACT` if its error exceeds `limit` or is NaN. The magnitudes of all other
    levels are added to `row_sizes`, float64 [r].
    """
    fits = errors <= limit
    levels[:] = np.where(fits, np.where(same, SAME, numbers), EXACT)
    row_sizes += np.where(fits & ~same, np.abs(numbers), 0).sum(1, dtype=np.float64)
    return int(np.count_nonzero(~fits)), float(errors[fits].max(initial=0.0))


def decode_tiles(
    codec: type[Codec],
    payloads: Sequence[Tensor],
    shape: torch.Size,
    dtype: torch.dtype,
    decode: Callable[[Rows, slice, np.ndarray, Placed], None],
    memory: Tensor | None = None,
) -> Tensor:
    """Decode the payloads of a `LevelWriter` to a tensor, in `memory`, a tensor like it, or in new memory.

    `decode(rows, columns, levels, out)` turns levels, int16 [r, c], into elements and writes them to `out`. It may
    write anything for `EXACT`, which this function overwrites. CorruptFileError: the payloads do not fit the shape.
    """
    R, C = matrix_shape(shape)
    if payloads[1].numel() % dtype.itemsize:
        raise codec.corrupt("payload 1", f"elements of {dtype.itemsize} bytes", f"{payloads[1].numel()} bytes")
    exact = payloads[1].clone().view(dtype)
    exact_count, positions = 0, [np.empty(0, np.int64)]
    decoded_levels = _decode_levels(codec, payloads[0], R, C)
    out = empty((R, C), dtype) if memory is None else memory.view(R, C)
    for rows, columns, levels, count in decoded_levels:
        if dtype == torch.float32:
            decode(rows, columns, levels, rows_of(out, rows, columns, "decoded"))
        else:
            decoded = scratch("decoded", levels.shape)
            decode(rows, columns, levels, (decoded, None))
            out[rows, columns] = torch.from_numpy(decoded).to(dtype)
        exact_count += count
        if count and exact_count <= len(exact):
            row, column = np.divmod(np.flatnonzero(levels == EXACT), levels.shape[1])
            matrix_rows = row + rows.start if isinstance(rows, slice) else rows[row]
            positions.append(matrix_rows * C + (column + columns.start))
    if exact_count != len(exact):
        raise codec.corrupt("payload 1", f"{exact_count} elements", f"{len(exact)}")
    out.view(-1)[torch.from_numpy(np.sort(np.concatenate(positions)))] = exact
    return out.view(shape)


def _decode_levels(
    codec: type[Codec], payload: Tensor, R: int, C: int
) -> Iterator[tuple[Rows, slice, np.ndarray, int]]:
    """Yield rows and columns, their levels (int16 [r, c], maybe scratch), and the number of exact elements in them.

    CorruptFileError: the payload is damaged or does not fit the shape.
    """
    count = tile_count(R, C, _CODED_TILE)
    blocks = BlockReader(codec, payload, 3 * count + 2)
    widths = blocks.read(3 * count, count).tolist()
    if not set(widths) <= set(_WIDTHS):
        raise codec.corrupt("widths of symbols", ", ".join(map(str, _WIDTHS)), str(sorted(set(widths)))[:80])
    classes = blocks.read(3 * count + 1, R if _has_classes(R, C) else 0)
    order = classes.argsort(kind="stable") if len(classes) else None
    return _decoded_levels(blocks, widths, order, R, C)


def _decoded_levels(
    blocks: BlockReader, widths: Sequence[int], order: np.ndarray | None, R: int, C: int
) -> Iterator[tuple[Rows, slice, np.ndarray, int]]:
    coded = [*tiles(R, C, _CODED_TILE)]
    step = _PACKED_TILES if C <= _CODED_TILE else 1
    for first in range(0, len(coded), step):
        start, columns = coded[first][0].start, coded[first][1]
        rows = slice(start, coded[min(first + step, len(coded)) - 1][0].stop)
        levels = scratch("unpacked", (rows.stop - start, columns.stop - columns.start), np.int16)
        exact_count = 0
        for index, (tile_rows, _) in enumerate(coded[first : first + step], first):
            tile = levels[tile_rows.start - start : tile_rows.stop - start].reshape(-1)
            exact_count += _read_tile(blocks, index, widths[index], tile)
        yield rows if order is None else _rows(order[rows]), columns, levels, exact_count


def _rows(numbers: np.ndarray) -> Rows:
    """Return row numbers as `Rows`: a single row as a slice, because a tile may hold only some of its columns."""
    return slice(numbers[0], numbers[0] + 1) if len(numbers) == 1 else numbers


def _read_tile(blocks: BlockReader, index: int, width: int, levels: np.ndarray) -> int:
    """Fill the levels of a tile, int16 [count], and return the number of exact elements in it."""
    high = blocks.read(3 * index, _packed_bytes(len(levels), width))
    low = blocks.read(3 * index + 1, len(levels) if width > 8 else 0)
    escape_count = _unpack(high, low, width, levels)
    escapes = blocks.read(3 * index + 2, 2 * escape_count)
    return _put_escapes(escapes, width, levels) if escape_count else 0


def _has_classes(R: int, C: int) -> bool:
    return C >= _SHORTEST_CLASSED_ROW and R * C > _CODED_TILE


def _row_classes(sizes: np.ndarray) -> np.ndarray:
    """Return the class of each row, uint8 [R]: 0 if all its levels are zero, same or exact, else 1 to 7.

    Classes 1 to 7 have equal numbers of rows. `sizes` are the sums of the magnitudes of each row's levels.
    """
    positive = np.sort(sizes[sizes > 0])
    lowest = positive[np.arange(_CLASSES - 1) * len(positive) // (_CLASSES - 1)] if len(positive) else positive
    return np.searchsorted(lowest, sizes, side="right").astype(np.uint8)


def _pack_tiles(
    levels: np.ndarray, order: np.ndarray | None
) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """Yield for each tile its width in bits, its first two blocks, and the levels of its escapes, int16.

    All but the width are scratch. `order` lists rows in the order in which they are coded, int64 [R].
    """
    (R, C), library = levels.shape, compiled.library()
    coded = [*tiles(R, C, _CODED_TILE)]
    widths, counts = scratch("widths", [_PACKED_TILES], np.uint8), scratch("counts", [_PACKED_TILES], np.int64)
    high, low = (scratch(use, [_PACKED_TILES, _CODED_TILE], np.uint8) for use in ("high", "low"))
    escapes = scratch("escapes", high.shape, np.int16)
    for index, (rows, columns) in enumerate(coded):
        if not library:
            yield _pack(levels[rows if order is None else order[rows], columns].reshape(-1))
            continue
        slot = index % _PACKED_TILES
        if slot == 0:
            packed = min(_PACKED_TILES, len(coded) - index)
            library.pack_tiles(levels, order, R, C, index, packed, widths, high, low, escapes, counts)
        count, width = (rows.stop - rows.start) * (columns.stop - columns.start), int(widths[slot])
        first, second = high[slot, : _packed_bytes(count, width)], low[slot, : count if width > 8 else 0]
        yield width, first, second, escapes[slot, : counts[slot]]


def _pack(levels: np.ndarray) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """Return the width of a flattened tile, its first two blocks, and the levels of its escapes."""
    sample = levels[:: len(levels) // _WIDTH_SAMPLE + 1]
    fitting = (w for w in _WIDTHS[:-1] if _escaped(sample, w).sum() * _LEVELS_PER_ESCAPE <= len(sample))
    width = next(fitting, _WIDTHS[-1])
    symbols, escapes = _to_symbols(levels, width)
    if width > 8:
        low = symbols & ((1 << (width - 8)) - 1)
        return width, (symbols >> (width - 8)).astype(np.uint8), low.astype(np.uint8), escapes
    sections = np.zeros((8 // width, _packed_bytes(len(levels), width)), np.int32)
    sections.reshape(-1)[: len(levels)] = symbols
    packed = (sections << np.arange(0, 8, width)[:, None]).sum(0)
    return width, packed.astype(np.uint8), np.empty(0, np.uint8), escapes


def _to_symbols(levels: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the symbol of each level, int32, and the levels of the escapes."""
    offset, escaped = _offset(width), _escaped(levels, width)
    symbols = np.where(levels == SAME, 0, levels.astype(np.int32) + offset)
    return np.where(escaped, (1 << width) - 1, symbols), levels[escaped]


def _escaped(levels: np.ndarray, width: int) -> np.ndarray:
    """Return for each level whether it has no symbol of its own, bool."""
    offset = _offset(width)
    outside = (levels < min(1 - offset, -1)) | (levels > (1 << width) - 2 - offset)
    return outside & ((levels != SAME) | (width == 2))


def _offset(width: int) -> int:
    """Return the difference between a symbol and its level."""
    return 1 if width == 2 else 1 << (width - 1)


def _unpack(high: np.ndarray, low: np.ndarray, width: int, levels: np.ndarray) -> int:
    """Fill the levels of a tile, int16 [count], and return the number of escapes.

    An escape is left as the level after the highest level that has a symbol, until `_put_escapes` replaces it.
    """
    if library := compiled.library():
        return library.unpack_levels(high, low, len(levels), width, levels)
    if width > 8:
        symbols = (high.astype(np.int32) << (width - 8)) | low
    else:
        sections = high.astype(np.int32) >> np.arange(0, 8, width)[:, None]
        symbols = (sections & ((1 << width) - 1)).reshape(-1)[: len(levels)]
    levels[:] = np.where((symbols == 0) & (width > 2), SAME, symbols - _offset(width))
    return int(np.count_nonzero(symbols == (1 << width) - 1))


def _put_escapes(escapes: np.ndarray, width: int, levels: np.ndarray) -> int:
    """Replace the escapes that `_unpack` left by their levels, a block; return the number of exact elements."""
    if library := compiled.library():
        return library.put_escapes(escapes, len(escapes) // 2, levels.size, width, levels)
    levels[levels == (1 << width) - 1 - _offset(width)] = bytes_to_int16(escapes)
    return int(np.count_nonzero(levels == EXACT))


def _packed_bytes(count: int, width: int) -> int:
    return -(-count // (8 // width)) if width < 8 else count
