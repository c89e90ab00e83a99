"""Shared by the lossy codecs: whole numbers ("levels") of few bits, and the elements they leave out.

Each element has a level q, or is the *same* as its prediction, or is *exact*, stored as it is. Two payloads:

| payload | content |
|---|---|
| 0 | the levels: 3n + 2 blocks (see `entropy`) for n tiles |
| 1 | the exact elements, row-major, in the tensor's dtype |

The tensor is viewed as a matrix [R, C], split between the two dimensions that make it most square, and cut into
tiles of at most 2**16 elements: 2**16 // C whole rows, or 2**16 columns of a longer row. If there is more than one
tile and C >= 128, its rows are coded in the order of their classes, which rise from 0 to 7 with the size of a row's
levels, and within a class in their own order: a tile has one Huffman code, so it should hold like rows.

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

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import Codec, empty
from hf_trainweights.checkpoint.codecs.entropy import BlockReader, BlockWriter, bytes_to_int16, int16_to_bytes

Tile = tuple[slice, slice]
"""Rows and columns of a matrix that are contiguous in memory."""

TILE = 1 << 17
"""Most elements of a tile for arithmetic: fewer are slower for the number of calls, more for the cache."""

# Most elements of a tile as it is stored.
_CODED_TILE = 1 << 16

_SAME, _EXACT = -(2**15), 2**15 - 1
# A row's class costs at most 3 bits and saves about 1/12 bit an element.
_SHORTEST_CLASSED_ROW = 128
_CLASSES = 8
# An escape costs 3 to 16 bits, a narrower symbol saves 1/8 bit or more; best on weights and moments of two models.
_ESCAPES_PER_TILE = 1 / 64
_WIDTH_SAMPLE = 4096
_WIDTHS = (2, 4, 8, 10, 12, 14, 16)


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Returns the shape [R, C] of the matrix that a tensor is viewed as; [0, 1] for an empty one."""
    count = shape.numel()
    if count == 0:
        return 0, 1
    splits = [shape[:dims].numel() for dims in range(1, len(shape))] or [1]
    return min(((rows, count // rows) for rows in splits), key=max)


def tiles(R: int, C: int, size: int = TILE) -> Iterator[Tile]:
    """Yields tiles of at most `size` elements that make up a matrix, in row-major order."""
    height = max(size // C, 1)
    for row in range(0, R, height):
        for column in range(0, C, size):
            yield slice(row, min(row + height, R)), slice(column, min(column + size, C))


def tile_count(R: int, C: int, size: int) -> int:
    """Returns how many tiles `tiles` yields."""
    return -(-R // max(size // C, 1)) * -(-C // size)


def moved_from(values: Tensor) -> Tensor | None:
    """Returns float32, 0 where the value is zero, else 1; None if no value is zero."""
    zeros = values.numpy() == 0
    return torch.from_numpy((~zeros).astype(np.float32)) if zeros.any() else None


def split_misfits(errors: Tensor, limit: float) -> tuple[Tensor | None, float]:
    """Finds the elements of a tile that a lossy codec must store exactly.

    Args:
        errors: float32, any shape, >= 0 or NaN.
        limit: The largest error to accept.

    Returns:
        int64 [m], positions in the flattened tile where the error is larger or NaN, or None if it is nowhere; and
        the largest other error.
    """
    worst = errors.amax().item()
    if worst <= limit:
        return None, worst
    values = errors.numpy()
    fits = values <= limit
    return torch.from_numpy(np.flatnonzero(~fits)), float(values[fits].max(initial=0.0))


def clip_(levels: Tensor) -> Tensor:
    """Brings levels into the range that can be stored, in place; those that change decode wrong, so are exact."""
    return levels.clamp_(_SAME + 1, _EXACT - 1)


class LevelWriter:
    """Collects the levels of a matrix [R, C], tile by tile in the order of `tiles`."""

    def __init__(self, R: int, C: int):
        self._levels = empty([R, C], torch.int16)
        self._row_sizes = torch.zeros(R)
        self._exact: list[Tensor] = []

    def write(
        self, tile: Tile, levels: Tensor, elements: Tensor, exact: Tensor | None, moved: Tensor | None = None
    ) -> None:
        """Adds one tile.

        Args:
            tile: Which one.
            levels: float32 [r, c], from `clip_`; overwritten.
            elements: [r, c], the tile's elements.
            exact: int64 [m], positions of elements that must be stored as they are; None: none.
            moved: float32 [r, c], 0 where the element equals its prediction, else 1; None: 1 everywhere.
        """
        stored = self._levels[tile]
        if moved is not None:
            levels.mul_(moved)
            stored.copy_((moved - 1).mul_(-_SAME).add_(levels))
        else:
            stored.copy_(levels)
        if exact is not None:
            levels.view(-1)[exact] = 0
            stored.view(-1)[exact] = _EXACT
            self._exact.append(elements.reshape(-1)[exact])
        self._row_sizes[tile[0]] += levels.abs_().sum(1)

    def payloads(self, dtype: torch.dtype) -> list[Tensor]:
        """Returns the two payloads, given the tensor's dtype."""
        exact = torch.cat([torch.empty(0, dtype=dtype), *self._exact])
        return [_encode_levels(self._levels.numpy(), self._row_sizes), exact.view(torch.uint8)]


@dataclass(frozen=True)
class Levels:
    """The levels of one tile, read back.

    Args:
        values: float32 [r, c], whole numbers; 0 where the element equals its prediction.
        moved: float32 [r, c], 0 where the element equals its prediction, else 1; None: 1 everywhere.
        exact: int64 [m], positions of elements stored as they are; None: none.
        elements: [m], those elements.
    """

    values: Tensor
    moved: Tensor | None
    exact: Tensor | None
    elements: Tensor

    def put(self, decoded: Tensor, out: Tensor) -> None:
        """Writes the decoded tile [r, c] into `out` [r, c], contiguous, the exact elements in their places."""
        out.copy_(decoded)
        if self.exact is not None:
            out.view(-1)[self.exact] = self.elements


def read_levels(
    codec: type[Codec], payloads: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype
) -> Iterator[tuple[Tile, Levels]]:
    """Returns what a `LevelWriter` collected, tile by tile in the order of `tiles`.

    Args:
        codec: Whose payloads they are, for messages.
        payloads: The two payloads, 1-D uint8 tensors.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.

    Raises:
        CorruptFileError: The payloads are damaged or do not fit the shape; all levels are decoded by then, so it
            is safe to allocate the tensor.
    """
    levels = _decode_levels(codec, payloads[0], *matrix_shape(shape))
    if payloads[1].numel() % dtype.itemsize:
        raise codec.corrupt("payload 1", f"elements of {dtype.itemsize} bytes", f"{payloads[1].numel()} bytes")
    elements = payloads[1].clone().view(dtype)
    exact_count = np.count_nonzero(levels == _EXACT)
    if exact_count != len(elements):
        raise codec.corrupt("payload 1", f"{exact_count} elements", f"{len(elements)}")
    return _split_levels(levels, elements)


def _split_levels(levels: np.ndarray, elements: Tensor) -> Iterator[tuple[Tile, Levels]]:
    for tile in tiles(*levels.shape):
        stored = levels[tile]
        values, moved, exact = torch.from_numpy(stored).to(torch.float32), None, None
        if stored.min() == _SAME:
            moved = torch.from_numpy((stored != _SAME).astype(np.float32))
            values.mul_(moved)
        if stored.max() == _EXACT:
            exact = torch.from_numpy(np.flatnonzero(stored == _EXACT))
        count = 0 if exact is None else len(exact)
        yield tile, Levels(values, moved, exact, elements[:count])
        elements = elements[count:]


def _encode_levels(levels: np.ndarray, row_sizes: Tensor) -> Tensor:
    R, C = levels.shape
    classes = _row_classes(row_sizes) if _has_classes(R, C) else np.empty(0, np.uint8)
    blocks = BlockWriter()
    widths: list[int] = []
    for index, _ in _coded_tiles(classes, R, C):
        tile = levels[index].reshape(-1)
        widths.append(_choose_width(tile))
        symbols, escapes = _to_symbols(tile, widths[-1])
        for block in (*_pack(symbols, widths[-1]), int16_to_bytes(escapes)):
            blocks.write(block)
    blocks.write(np.array(widths, np.uint8))
    blocks.write(classes)
    return blocks.payload()


def _decode_levels(codec: type[Codec], payload: Tensor, R: int, C: int) -> np.ndarray:
    """Returns int16 [R, C]."""
    count = tile_count(R, C, _CODED_TILE)
    blocks = BlockReader(codec, payload, 3 * count + 2)
    widths = blocks.read(3 * count, count).tolist()
    if not set(widths) <= set(_WIDTHS):
        raise codec.corrupt("widths of symbols", ", ".join(map(str, _WIDTHS)), str(sorted(set(widths)))[:80])
    classes = blocks.read(3 * count + 1, R if _has_classes(R, C) else 0)
    levels = np.empty((R, C), np.int16)
    for number, (index, shape) in enumerate(_coded_tiles(classes, R, C)):
        width, elements = widths[number], shape[0] * shape[1]
        high = blocks.read(3 * number, _packed_bytes(elements, width))
        low = blocks.read(3 * number + 1, elements if width > 8 else 0)
        symbols = _unpack(high, low, width, elements)
        tile = _to_levels(symbols, width)
        escape = (1 << width) - 1
        escaped = np.flatnonzero(symbols == escape) if symbols.max() == escape else symbols[:0]
        escapes = blocks.read(3 * number + 2, 2 * len(escaped))
        if len(escaped):
            tile[escaped] = bytes_to_int16(escapes)
        levels[index] = tile.reshape(shape)
    return levels


def _coded_tiles(
    classes: np.ndarray, R: int, C: int
) -> Iterator[tuple[tuple[slice | np.ndarray, slice], tuple[int, int]]]:
    """Yields numpy index and shape of each tile in the order they are coded."""
    order = classes.argsort(kind="stable") if len(classes) else None
    for rows, columns in tiles(R, C, _CODED_TILE):
        shape = rows.stop - rows.start, columns.stop - columns.start
        yield (rows if order is None else order[rows], columns), shape


def _has_classes(R: int, C: int) -> bool:
    return C >= _SHORTEST_CLASSED_ROW and R * C > _CODED_TILE


def _row_classes(sizes: Tensor) -> np.ndarray:
    """Returns uint8 [R]: 0 for rows of zeros and the same, 1 to 7 for equal numbers of the others."""
    numbers = sizes.numpy()
    positive = np.sort(numbers[numbers > 0])
    lowest = positive[np.arange(_CLASSES - 1) * len(positive) // (_CLASSES - 1)] if len(positive) else positive
    return np.searchsorted(lowest, numbers, side="right").astype(np.uint8)


def _choose_width(levels: np.ndarray) -> int:
    """Returns the narrowest width that fits nearly all levels of a sample."""
    sample = levels[:: len(levels) // _WIDTH_SAMPLE + 1].copy()
    for width in _WIDTHS[:-1]:
        if np.count_nonzero(_escaped(sample, width)) <= _ESCAPES_PER_TILE * len(sample):
            return width
    return _WIDTHS[-1]


def _range(width: int) -> tuple[int, int, int]:
    """Returns the lowest and the highest level that a width holds, and by how much its symbols are larger."""
    offset = 1 if width == 2 else 1 << (width - 1)
    return (-1 if width == 2 else 1 - offset), (1 << width) - 2 - offset, offset


def _escaped(levels: np.ndarray, width: int) -> np.ndarray:
    """Returns bool, true where a level has no symbol."""
    lowest, highest, _ = _range(width)
    outside = (levels < lowest) | (levels > highest)
    return outside if width == 2 else outside & (levels != _SAME)


def _to_symbols(levels: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the symbols, uint16, and the levels of the escapes."""
    lowest, highest, offset = _range(width)
    if levels.min() >= lowest and levels.max() <= highest:
        return levels.view(np.uint16) + np.uint16(offset), levels[:0]
    escaped = np.flatnonzero(_escaped(levels, width))
    # The same, which is below every level, becomes 0.
    symbols = torch.from_numpy(levels).clamp(lowest - 1, highest + 1).numpy().view(np.uint16) + np.uint16(offset)
    symbols[escaped] = (1 << width) - 1
    return symbols, levels[escaped]


def _to_levels(symbols: np.ndarray, width: int) -> np.ndarray:
    """Undoes `_to_symbols`, but for the escapes."""
    offset = _range(width)[2]
    levels = (symbols - np.uint16(offset)).view(np.int16)
    if width > 2 and symbols.min() == 0:
        levels += (symbols == 0) * np.int16(_SAME + offset)
    return levels


def _pack(symbols: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first two blocks of a tile."""
    if width > 8:
        low = symbols & np.uint16((1 << (width - 8)) - 1)
        return (symbols >> (width - 8)).astype(np.uint8), low.astype(np.uint8)
    narrow = symbols.astype(np.uint8)
    size = _packed_bytes(len(symbols), width)
    packed = narrow[:size]
    for part in range(1, 8 // width):
        later = narrow[part * size : (part + 1) * size]
        packed[: len(later)] += later * np.uint8(1 << (part * width))  # in numpy 2.4 six times as fast as a shift
    return packed, narrow[:0]


def _unpack(high: np.ndarray, low: np.ndarray, width: int, count: int) -> np.ndarray:
    """Undoes `_pack`."""
    if width > 8:
        return high.astype(np.uint16) * np.uint16(1 << (width - 8)) + low
    symbols = np.empty((8 // width, len(high)), np.uint16)
    for part, row in enumerate(symbols):
        np.bitwise_and(high >> np.uint8(part * width) if part else high, (1 << width) - 1, out=row)
    return symbols.reshape(-1)[:count]


def _packed_bytes(count: int, width: int) -> int:
    return -(-count // (8 // width)) if width < 8 else count
