"""`log-rank1` and `update-space`: Adam's second moment in the log domain, and the first in units of the second's root.

`log-rank1` holds exp_avg_sq v as a difference to its row and column means. v spans tens of powers of two and must never
become zero, or the next update explodes: it is quantized in log2, where a step is a factor. Rows and columns explain
most of it, as in Adafactor (Shazeer and Stern 2018), which saves two bits per element.

With r and c the means of log2(v) over the element's row and column (see `rank1`), whole multiples of 1/128, and
P(k) = 2**(k/128), cut down to a float of 24 bits, with 2**(k // 128) as a factor of its own:

| | |
|---|---|
| encode | level q = round((log2(v) - r - c) / step); zero has its own symbol |
| decode | (2**(q * step) * P(128 r)) * P(128 c) in float32, then rounded to the tensor's dtype; 0 for that symbol |

2**(q * step) is put together from its bits, and P is cut far from where float64 rounds, so decoding gives the same bits
on every machine. An element that is negative, NaN or infinite, or would decode further off, is stored as it is (see
`levels`); no other element decodes to zero, infinity or NaN.

`update-space` holds exp_avg m in units of sqrt(exp_avg_sq), by which Adam divides it in an update. With v the DECODED
exp_avg_sq and t = sqrt(v) * step, all float32, each operation rounded once:

| | |
|---|---|
| encode | level q = round(m / t) |
| decode | q * t, then rounded to the tensor's dtype; there is no symbol of its own |

So an error of step / 2 changes the next update of that weight by at most step / 2 learning rates, whatever the
size of m. An element that is not finite, or not zero where v is zero, or too far away is stored as it is (see
`levels`).

| payload | content |
|---|---|
| 0, 1 | as in `levels` |
| 2 | of `log-rank1` alone: as in `rank1` |

| parameter | content |
|---|---|
| step | of `log-rank1` int, in units of log2; of `update-space` float, exact in float32 |
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import LOSSY_DTYPES, Codec, EncodedTensor, Params, References
from hf_trainweights.checkpoint.codecs.coding import compiled
from hf_trainweights.checkpoint.codecs.coding.blocks import (
    Placed,
    Rows,
    Tile,
    dense,
    fill,
    matrix_shape,
    rounded_to,
    rows_of,
    scratch,
    tiles,
    to_float32,
)
from hf_trainweights.checkpoint.codecs.coding.levels import (
    EXACT,
    SAME,
    LevelWriter,
    decode_tiles,
    place_levels,
    to_levels,
)
from hf_trainweights.checkpoint.codecs.coding.rank1 import MEAN_UNITS, decode_means, encode_means, log_means
from hf_trainweights.errors import ConfigError

# A number for each row of a tile, float32 [r], and one for each column, float32 [c].
Vectors = tuple[np.ndarray, np.ndarray]

_LARGEST_LOG_STEP = 16
# In units of log2, beyond step / 2: room for the rounding to the tensor's dtype.
_LOG_SLACK = 2**-6
_SMALLEST_UPDATE_STEP, _LARGEST_UPDATE_STEP = 2.0**-10, 2.0**10
# In units of the step. Rounding gives 1/2, and the tensor's dtype a little more.
_UPDATE_LIMIT = 0.75
_TINY = torch.finfo(torch.float32).tiny
# log2(1 + r) / r from r = -1/3 to 1/3, lowest power first, for errors below 5e-8; the same as in native/levels.c.
_LOG2 = np.array(
    [1.44269407, -0.721343935, 0.481019735, -0.360927671, 0.28458789, -0.234679684, 0.252026826, -0.231981888],
    np.float32,
)


@dataclass(frozen=True)
class LogRank1(Codec):
    """Codes exp_avg_sq with one uniform step of log2 around the product of its row and column means.

    The bound is the largest |log2(decoded / original)|; zeros are exact.

    Args:
        step: Distance of two levels in units of log2, from 1 (factor at most 1.42) to 16.

    Examples:
        >>> import torch
        >>> exp_avg_sq = torch.rand(64, 64) * 1e-9
        >>> encoded = LogRank1(step=1).encode(exp_avg_sq)
        >>> encoded.bound < 0.52
        True
    """

    step: int = 1

    codec_id: ClassVar[str] = "log-rank1"
    lossless: ClassVar[bool] = False
    roles: ClassVar[tuple[str, ...]] = ("exp_avg_sq",)
    dtypes: ClassVar[frozenset[torch.dtype]] = LOSSY_DTYPES

    def __post_init__(self) -> None:
        if type(self.step) is not int or not 1 <= self.step <= _LARGEST_LOG_STEP:
            allowed = f"a whole number from 1 to {_LARGEST_LOG_STEP}"
            raise ConfigError("log-rank1, step", allowed, repr(self.step), "Usual are 1 and 2.")

    def _encode(self, tensor: Tensor, references: References) -> EncodedTensor:
        return self.encode_tiles(tensor)

    @np.errstate(all="ignore")
    def encode_tiles(
        self, tensor: Tensor, use_decoded: Callable[[Tile, Tensor], None] = lambda tile, decoded: None
    ) -> EncodedTensor:
        """Encode a contiguous CPU tensor, and call `use_decoded` for each of its tiles, in the order of `tiles`.

        It is given what decoding the tile will give, [r, c], in memory that the next tile reuses.
        """
        shape = matrix_shape(tensor.shape)
        original = tensor.view(shape)
        means = log_means(original)
        row_logs, column_logs = ((each.to(torch.float32) / MEAN_UNITS).numpy() for each in means)
        row_factors, column_factors = _factors(*means)
        writer = LevelWriter(tensor)
        for tile in tiles(*shape):
            rows, columns = tile
            logs, factors = (row_logs[rows], column_logs[columns]), (row_factors[rows], column_factors[columns])
            decoded = scratch("decoded", original[tile].shape)
            writer.write(tile, partial(_encode_second, logs, factors, self.step, decoded))
            use_decoded(tile, torch.from_numpy(decoded).to(tensor.dtype))
        # The errors are logarithms of float32 quotients.
        payloads = [*writer.payloads(), encode_means(*means)]
        return EncodedTensor(payloads, {"step": self.step}, writer.bound + 2**-20)

    @classmethod
    @np.errstate(all="ignore")
    def _decode(
        cls, payloads: Sequence[Tensor], params: Params, shape: torch.Size, dtype: torch.dtype, references: References
    ) -> Tensor:
        step = cls.param(params, "step", int, 1, _LARGEST_LOG_STEP)
        cls.check_count(payloads, 3)

        @cache
        def factors() -> Vectors:  # first asked for when the payload is known to have levels for the shape
            return _factors(*decode_means(cls, payloads[2], *matrix_shape(shape)))

        def decode(rows: Rows, columns: slice, levels: np.ndarray, out: Placed) -> None:
            of_tile = factors()[0][rows], factors()[1][columns]
            if library := compiled.library():
                library.log_decode(levels, *of_tile, step << 23, *levels.shape, *out)
            else:
                fill(out, _values(levels, of_tile, step) * (levels != SAME))

        return decode_tiles(cls, payloads, shape, dtype, decode)


def _encode_second(
    logs: Vectors,
    factors: Vectors,
    step: int,
    decoded: np.ndarray,
    elements: Tensor,
    levels: np.ndarray,
    row_sizes: np.ndarray,
) -> tuple[int, float]:
    """Do as `place_levels` says, and fill in what decoding will give; errors are in units of log2.

    `logs` are the means of log2 of its rows and columns, `factors` 2 to the power of these.
    """
    x, inverse = to_float32(elements, "x"), float(np.float32(1 / step))
    if library := compiled.library():
        quotients = scratch("quotients", x.shape)
        numbers = inverse, step << 23, compiled.DTYPES[elements.dtype]
        library.log_levels(x, *logs, *factors, *numbers, *x.shape, levels, decoded, quotients, row_sizes)
    else:
        same = x == 0
        positive = np.where(same, np.float32(1), x)  # zeros have their own symbol
        numbers = to_levels((_log2(positive) - logs[0][:, None] - logs[1]) * np.float32(inverse))
        values = rounded_to(elements.dtype, _values(numbers, factors, step))
        place_levels(numbers, same, np.zeros_like(x), 0.0, levels, row_sizes)
        decoded[:] = values * ~same
        # The power that a negative number gets may be negative, too.
        quotients = np.where(positive < 0, np.float32(0), values / positive)
    misfits, worst = _misfits(quotients, step / 2 + _LOG_SLACK)
    misplaced = levels.reshape(-1)[misfits]
    sizes = np.abs(misplaced.astype(np.float64)) * (misplaced != SAME)
    np.subtract.at(row_sizes, misfits // levels.shape[1], sizes)
    levels.reshape(-1)[misfits] = EXACT
    decoded.reshape(-1)[misfits] = x.reshape(-1)[misfits]
    return len(misfits), worst


def _log2(x: np.ndarray) -> np.ndarray:
    """Return log2 to within 8e-6, with the same bits on every machine; what is not positive gives any number."""
    is_small = x < _TINY
    bits = np.where(is_small, x * np.float32(2**32), x).view(np.int32)
    above = bits - np.int32(0x3F2AAAAB)  # 2/3
    r = (bits - (above & np.int32(-1 << 23))).view(np.float32) - np.float32(1)
    total = np.full_like(r, _LOG2[-1])
    for coefficient in _LOG2[-2::-1]:
        total = total * r + coefficient
    return total * r + ((above >> 23).astype(np.float32) - np.float32(32) * is_small)


def _values(levels: np.ndarray, factors: Vectors, step: int) -> np.ndarray:
    """Decode levels; the arithmetic and its order are part of the format.

    A power of two is put together from its bits, wrapping: one outside float32's normal range decodes to nonsense,
    and its element was stored exactly.
    """
    bits = np.int32(127 << 23) + levels.astype(np.int32) * np.int32(step << 23)
    return bits.view(np.float32) * factors[0][:, None] * factors[1]


def _factors(row_means: Tensor, column_means: Tensor) -> Vectors:
    """Return 2**(mean / 128), float32 cut to 24 bits: [R] and [C]."""
    rows, columns = (
        ((means >> 7 << 23) + _mantissas()[means & 127].view(torch.int32)).view(torch.float32).numpy()
        for means in (row_means, column_means)
    )
    return rows, columns


@cache
def _mantissas() -> Tensor:
    """Return 2**(k/128) for k = 0 ... 127, float32 [128], cut to 23 bits.

    These are the same on every machine: no power but the first, 1, is nearer than 2**-39 to a multiple of 2**-23.
    """
    return torch.from_numpy(np.floor(np.exp2(np.arange(128) / 128) * 2**23) / 2**23).to(torch.float32)


def _misfits(quotients: np.ndarray, limit: float) -> tuple[np.ndarray, float]:
    """Return where |log2| exceeds the limit or is NaN, int64 [m], and the largest other one."""
    lowest, highest = float(quotients.min()), float(quotients.max())
    if lowest > 0:  # the logarithms of only two numbers
        worst = max(-math.log2(lowest), math.log2(highest))
        if worst <= limit:
            return np.empty(0, np.int64), worst
    errors = np.abs(np.log2(quotients))
    fits = errors <= limit
    return np.flatnonzero(~fits), float(errors[fits].max(initial=0.0))


@dataclass(frozen=True)
class UpdateSpace(Codec):
    """Codes exp_avg with one uniform step in units of sqrt(exp_avg_sq).

    The bound is in these units; where exp_avg_sq is zero, the element is exact.

    Args:
        step: Distance of two levels, between 2**-10 and 2**10.

    Examples:
        >>> import torch
        >>> exp_avg, exp_avg_sq = torch.randn(64, 64) * 1e-3, torch.full([64, 64], 1e-6)
        >>> encoded = UpdateSpace(step=0.25).encode(exp_avg, {"exp_avg_sq": exp_avg_sq})
        >>> 0.12 < encoded.bound < 0.126
        True
    """

    step: float = 0.25

    codec_id: ClassVar[str] = "update-space"
    lossless: ClassVar[bool] = False
    roles: ClassVar[tuple[str, ...]] = ("exp_avg",)
    references: ClassVar[tuple[str, ...]] = ("exp_avg_sq",)
    dtypes: ClassVar[frozenset[torch.dtype]] = LOSSY_DTYPES

    def __post_init__(self) -> None:
        if not _SMALLEST_UPDATE_STEP <= self.step <= _LARGEST_UPDATE_STEP:
            allowed = f"a number from {_SMALLEST_UPDATE_STEP} to {_LARGEST_UPDATE_STEP}"
            raise ConfigError("update-space, step", allowed, repr(self.step), "Usual are 0.25 and 0.5.")

    def _encode(self, tensor: Tensor, references: References) -> EncodedTensor:
        if "exp_avg_sq" not in references:
            next_step = "Pass the decoded exp_avg_sq, or use a lossless codec."
            raise ConfigError("codec update-space, references", "exp_avg_sq", "nothing", next_step)
        shape = matrix_shape(tensor.shape)
        squares, encoder = references["exp_avg_sq"].view(shape), TileEncoder(tensor, self.step)
        for tile in tiles(*shape):
            encoder.add(tile, squares[tile])
        return encoder.finish()

    @classmethod
    @np.errstate(all="ignore")
    def _decode(
        cls, payloads: Sequence[Tensor], params: Params, shape: torch.Size, dtype: torch.dtype, references: References
    ) -> Tensor:
        step = cls.param(params, "step", float, _SMALLEST_UPDATE_STEP, _LARGEST_UPDATE_STEP)
        squares = cls.needed(references, "exp_avg_sq").view(matrix_shape(shape))
        cls.check_count(payloads, 2)

        def decode(rows: Rows, columns: slice, levels: np.ndarray, out: Placed) -> None:
            # The arithmetic and its order are part of the format.
            of_tile = rows_of(squares, rows, columns, "squares")
            if library := compiled.library():
                library.update_decode(levels, *of_tile, step, *levels.shape, *out)
            else:
                fill(out, levels * _unit(dense(of_tile), step))

        return decode_tiles(cls, payloads, shape, dtype, decode)


class TileEncoder:
    """Encodes a contiguous CPU tensor of first moments, given the second moments of one tile after the other."""

    def __init__(self, tensor: Tensor, step: float):
        self._writer, self._step = LevelWriter(tensor), float(np.float32(step))

    @np.errstate(all="ignore")
    def add(self, tile: Tile, squares: Tensor) -> None:
        """Encode the next one of `tiles`; `squares` are its decoded second moments [r, c]."""
        self._writer.write(tile, partial(_encode_first, squares, self._step))

    def finish(self) -> EncodedTensor:
        """Return the tensor when all tiles are encoded."""
        # The quotients are rounded to float32, some of them to denormals or zero.
        bound = (self._writer.bound + _TINY) * self._step * (1 + 2**-20)
        return EncodedTensor(self._writer.payloads(), {"step": self._step}, bound)


def _encode_first(
    squares: Tensor, step: float, elements: Tensor, levels: np.ndarray, row_sizes: np.ndarray
) -> tuple[int, float]:
    """Do as `place_levels` says; errors are in units of the step."""
    m, v = to_float32(elements, "m"), to_float32(squares, "squares")
    if library := compiled.library():
        worst, dtype = ctypes.c_float(), compiled.DTYPES[elements.dtype]
        results = levels, row_sizes, ctypes.addressof(worst)
        return library.update_levels(m, v, step, _UPDATE_LIMIT, dtype, *m.shape, *results), worst.value
    unit = _unit(v, step)
    divisor = np.where(unit < _TINY, np.float32(_TINY), unit)
    numbers = to_levels(m / divisor)
    errors = np.abs(rounded_to(elements.dtype, numbers * unit) - m) / divisor
    # Here the divisor is not the unit, which is zero: accept nothing but zero.
    errors[(unit < _TINY) & (m != 0)] = np.inf
    return place_levels(numbers, np.zeros(m.shape, bool), errors, _UPDATE_LIMIT, levels, row_sizes)


def _unit(squares: np.ndarray, step: float) -> np.ndarray:
    """Return the distance of two levels; numpy rounds the root correctly, torch (2.13, MKL) in five cases of six."""
    return np.sqrt(squares) * np.float32(step)
