"""The loops of the lossy codecs as the C functions of `native/`.

Where they are not compiled, the codecs take numpy. Both give the same bytes: each operation is rounded once, in the
same order. All arrays are contiguous; tiles are float32 [r, c], whatever the dtype of the tensor. They are larger than
numpy's, because one call does all passes over a tile, and does not come back to Python's lock, which training needs.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from hf_trainweights.checkpoint.codecs.coding.tiles import scratch
from hf_trainweights.files.native_library import address, load_library

_LIBRARY = Path(__file__).parents[1] / "native" / "levels.so"
_FUNCTIONS = {
    "delta_levels": "lpppplfffillppp",
    "delta_decode": "-ppplfllp",
    "update_levels": "lppffillppp",
    "update_decode": "-ppfllp",
    "log_levels": "-ppppppfuillpppp",
    "log_decode": "-pppullp",
    "find_exact": "lplp",
    "pack_tiles": "-ppllllppppp",
    "unpack_levels": "lpplip",
    "put_escapes": "lpllip",
}
# As in native/levels.c.
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Width, two blocks, and escapes of a tile.
Packed = tuple[int, np.ndarray, np.ndarray, np.ndarray]

TILE = 1 << 20
"""Most elements of a tile."""

CODED_TILE = 1 << 16
"""Most levels that are coded together; `TILE` in native/symbols.c."""

# Tiles of symbols that are packed at once.
_PACKED_TILES = 16


@functools.cache
def _load() -> ctypes.CDLL | None:
    return load_library(_LIBRARY, _FUNCTIONS)


def is_available() -> bool:
    """Return whether the functions are compiled."""
    return _load() is not None


def delta_levels(
    x: np.ndarray,
    anchor: np.ndarray | None,
    moment: np.ndarray | None,
    dither: tuple[np.ndarray, int],
    step: float,
    limit: float,
    dtype: torch.dtype,
    place: tuple[np.ndarray, np.ndarray],
) -> tuple[int, float]:
    """Do as `delta_uniform` says for a tile x; return how many elements miss the limit, and the largest other error.

    Without an anchor it is zero, without a moment it does not matter. `dither` is the table and where in it that of the
    tile begins. Decoded numbers are rounded to `dtype`. `place` is where the levels go, int16 [r, c], and what the sums
    of their sizes are added to, float64 [r].
    """
    worst = ctypes.c_float()
    numbers = step, float(np.float32(1 / step)), limit, _DTYPES[dtype]
    inputs = address(x), address(anchor), address(moment), address(dither[0]), dither[1]
    results = *map(address, place), ctypes.addressof(worst)
    missed = _library().delta_levels(*inputs, *numbers, *x.shape, *results)
    return missed, worst.value


def delta_decode(
    levels: np.ndarray, anchor: np.ndarray | None, dither: tuple[np.ndarray, int], step: float, out: np.ndarray
) -> None:
    """Undo `delta_levels`, but for elements that are stored as they are."""
    inputs = address(levels), address(anchor), address(dither[0]), dither[1]
    _library().delta_decode(*inputs, step, *out.shape, address(out))


def update_levels(
    m: np.ndarray,
    squares: np.ndarray,
    step: float,
    limit: float,
    dtype: torch.dtype,
    place: tuple[np.ndarray, np.ndarray],
) -> tuple[int, float]:
    """Do as `update_space` says for a tile of exp_avg; errors and the limit are in units of the step.

    Other arguments and results are those of `delta_levels`.
    """
    worst = ctypes.c_float()
    numbers = step, limit, _DTYPES[dtype]
    pointers = *map(address, place), ctypes.addressof(worst)
    missed = _library().update_levels(address(m), address(squares), *numbers, *m.shape, *pointers)
    return missed, worst.value


def update_decode(levels: np.ndarray, squares: np.ndarray, step: float, out: np.ndarray) -> None:
    """Undo `update_levels`, but for elements that are stored as they are."""
    _library().update_decode(address(levels), address(squares), step, *out.shape, address(out))


def log_levels(
    x: np.ndarray,
    logs: np.ndarray,
    means: tuple[np.ndarray, np.ndarray],
    factors: tuple[np.ndarray, np.ndarray],
    step: int,
    dtype: torch.dtype,
    place: tuple[np.ndarray, np.ndarray],
    decoded: np.ndarray,
) -> np.ndarray:
    """Do as `log_rank1` says for a tile of exp_avg_sq, fill `decoded`, and return decoded over original numbers.

    `logs` are those of x, anything where x is zero; `means` those of rows and columns, float32 [r] and [c], `factors`
    the powers of these. The result is scratch [r, c], near 1 where x is zero. See `delta_levels` for the others.
    """
    quotients = scratch("quotients", x.shape)
    vectors = map(address, (*means, *factors))
    numbers = float(np.float32(1 / step)), step << 23, _DTYPES[dtype]
    results = map(address, (place[0], decoded, quotients, place[1]))
    _library().log_levels(address(x), address(logs), *vectors, *numbers, *x.shape, *results)
    return quotients


def log_decode(levels: np.ndarray, factors: tuple[np.ndarray, np.ndarray], step: int, out: np.ndarray) -> None:
    """Undo `log_levels`, but for elements that are stored as they are."""
    _library().log_decode(address(levels), *map(address, factors), step << 23, *out.shape, address(out))


def find_exact(levels: np.ndarray) -> np.ndarray:
    """Return the positions of elements that are stored as they are, int64, scratch."""
    positions = scratch("positions", [levels.size], np.int64)
    return positions[: _library().find_exact(address(levels), levels.size, address(positions))]


def pack_tiles(levels: np.ndarray, order: np.ndarray | None, count: int) -> Iterator[Packed]:
    """Yield the symbols of each tile of levels, int16 [R, C], as `levels` says; all but the width are scratch.

    They are the width, the first two blocks, uint8, of which what comes first counts, and the escapes, int16. `order`
    is that of the rows, int64 [R].
    """
    widths = scratch("widths", [_PACKED_TILES], np.uint8)
    high, low = (scratch(use, [_PACKED_TILES, CODED_TILE], np.uint8) for use in ("high", "low"))
    escapes, escape_counts = scratch("escapes", high.shape, np.int16), scratch("counts", widths.shape, np.int64)
    results = [address(array) for array in (widths, high, low, escapes, escape_counts)]
    for first in range(0, count, _PACKED_TILES):
        tiles = min(_PACKED_TILES, count - first)
        _library().pack_tiles(address(levels), address(order), *levels.shape, first, tiles, *results)
        for tile in range(tiles):
            yield int(widths[tile]), high[tile], low[tile], escapes[tile, : escape_counts[tile]]


def unpack_levels(high: np.ndarray, low: np.ndarray, width: int, count: int) -> tuple[np.ndarray, int]:
    """Return the levels of a tile, int16 [count], scratch, and how many escapes there are to put among them."""
    levels = scratch("unpacked", [count], np.int16)
    return levels, _library().unpack_levels(address(high), address(low), count, width, address(levels))


def put_escapes(escapes: np.ndarray, width: int, levels: np.ndarray) -> int:
    """Put the escapes, a block, among the levels, and return how many elements are stored as they are."""
    return _library().put_escapes(address(escapes), len(escapes) // 2, levels.size, width, address(levels))


def _library() -> ctypes.CDLL:
    library = _load()
    assert library is not None  # who calls has asked `is_available`
    return library
