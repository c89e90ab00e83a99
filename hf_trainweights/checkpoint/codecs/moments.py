"""`update-space` and `log-rank1`: the codecs of Adam's two moments, m = exp_avg and v = exp_avg_sq.

For each weight, Adam keeps m, the running mean of its gradients, and v, the running mean of their squares. An update
changes the weight by about m / sqrt(v) learning rates. Each codec rounds its moment so that this quotient stays close.
Both round to whole numbers of steps, the *levels* q (see `levels`).

`log-rank1` stores v. v spans tens of powers of two and must never become zero, or the next update explodes. So the
codec rounds log2(v), where a step is a factor: with step 1 a decoded v is off by a factor of at most 1.42. It predicts
log2(v) from the element's row and column, as Adafactor predicts v (Shazeer and Stern 2018), and stores the difference
to this prediction. That saves two bits per element.

The prediction is r + c: r and c are the means of log2(v) for the element's row and column (see `rank1`), in units of
log2 and multiples of 1/128. To return from logarithms, P(k) = 2**(k // 128) * M(k mod 128), in which M(k) is 2**(k/128)
cut down to a float of 24 bits:

| | |
|---|---|
| encode | level q = round((log2(v) - r - c) / step); a zero is "same" in the terms of `levels` |
| decode | (2**(q * step) * P(128 r)) * P(128 c) in float32, then rounded to the tensor's dtype; 0 for "same" |

Decoding gives the same bits on every machine: 2**(q * step) is put together from the bits of a float, and no 2**(k/128)
is so close to a float of 24 bits that the rounding of float64 could change M. An element is stored as it is (see
`levels`) if it is negative, NaN or infinite, or if its level would decode to a number further away than step / 2 and a
little for rounding. No other element decodes to zero, infinity or NaN.

`update-space` stores m in units of sqrt(v), because an update depends on m / sqrt(v). v is the DECODED exp_avg_sq, the
only one that a reader has. The distance of two levels of m is t = sqrt(v) * step, different for each element. All
numbers are float32, and each operation is rounded once:

| | |
|---|---|
| encode | level q = round(m / t) |
| decode | q * t, then rounded to the tensor's dtype; no element is "same" |

So m is off by at most t / 2, which changes the next update of the weight by at most step / 2 learning rates, whatever
the size of m. An element is stored as it is (see `levels`) if it is not finite, too far away for a level, or not zero
although v is zero.

| payload | content |
|---|---|
| 0, 1 | as in `levels` |
| 2 | in `log-rank1` alone: as in `rank1` |

| parameter | content |
|---|---|
| step | in `log-rank1` int, in units of log2; in `update-space` float, exact in float32, in units of sqrt(v) |
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

from hf_trainweights.checkpoint.codecs.base import LOSSY_DTYPES, SQUARES, Codec, EncodedTensor, Params, References
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

# A number for each row, float32 [r], and one for each column, float32 [c], of a tile or a matrix.
Vectors = tuple[np.ndarray, np.ndarray]

_LARGEST_LOG_STEP = 16
# An element of log-rank1 may be off by step / 2 from rounding to a level, and by this much more, in units of log2, from
# rounding to the tensor's dtype. If it is off by more, it is stored as it is.
_LOG_SLACK = 2**-6
_SMALLEST_UPDATE_STEP, _LARGEST_UPDATE_STEP = 2.0**-10, 2.0**10
# An element of update-space that is off by more than this many steps is stored as it is. Rounding to a level gives
# errors up to 1/2 step, and rounding to the tensor's dtype adds a little.
_UPDATE_LIMIT = 0.75
# The smallest normal float32.
_TINY = torch.finfo(torch.float32).tiny
# A polynomial for log2(1 + r) / r from r = -1/3 to 1/3, lowest power first, errors below 5e-8; also in native/levels.c.
_LOG2 = np.array(
    [1.44269407, -0.721343935, 0.481019735, -0.360927671, 0.28458789, -0.234679684, 0.252026826, -0.231981888],
    np.float32,
)


@dataclass(frozen=True)
class LogRank1(Codec):
    """Rounds log2 of exp_avg_sq to a uniform step, counted from a prediction by row and column means.

    The bound is the largest |log2(decoded / original)|; zeros are exact.

    Args:
        step: Distance of two levels in units of log2, from 1 (errors are factors of at most 1.42) to 16.

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
    roles: ClassVar[tuple[str, ...]] = SQUARES
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
        """Encode a contiguous CPU tensor, and pass each of its `tiles` with the decoded elements to `use_decoded`.

        The decoded elements, [r, c], are in memory that the next tile reuses.
        """
        shape = matrix_shape(tensor.shape)
        original = tensor.view(shape)
        means = log_means(original)
        row_logs, column_logs = ((vector.to(torch.float32) / MEAN_UNITS).numpy() for vector in means)
        row_factors, column_factors = _factors(*means)
        writer = LevelWriter(tensor)
        for tile in tiles(*shape):
            rows, columns = tile
            logs, factors = (row_logs[rows], column_logs[columns]), (row_factors[rows], column_factors[columns])
            decoded = scratch("decoded", original[tile].shape)
            writer.write(tile, partial(_encode_second, logs, factors, self.step, decoded))
            use_decoded(tile, torch.from_numpy(decoded).to(tensor.dtype))
        payloads = [*writer.payloads(), encode_means(*means)]
        # 2**-20 covers the rounding of the errors, which were measured as logarithms of float32 quotients.
        return EncodedTensor(payloads, {"step": self.step}, writer.bound + 2**-20)

    @classmethod
    @np.errstate(all="ignore")
    def _decode(
        cls, payloads: Sequence[Tensor], params: Params, shape: torch.Size, dtype: torch.dtype, references: References
    ) -> Tensor:
        step = cls.param(params, "step", int, 1, _LARGEST_LOG_STEP)
        cls.check_count(payloads, 3)

        @cache
        def factors() -> Vectors:  # first called when `decode_tiles` has checked that the levels fit the shape
            return _factors(*decode_means(cls, payloads[2], *matrix_shape(shape)))

        def decode(rows: Rows, columns: slice, levels: np.ndarray, out: Placed) -> None:
            tile_factors = factors()[0][rows], factors()[1][columns]
            if library := compiled.library():
                library.log_decode(levels, *tile_factors, step << 23, *levels.shape, *out)
            else:
                fill(out, _values(levels, tile_factors, step) * (levels != SAME))

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
    """Encode a tile of second moments for `LevelWriter.write`, and fill `decoded` with the decoded elements.

    `logs` are the means r of its rows and c of its columns, in units of log2. `factors` are 2 to the power of these.
    Errors are |log2(decoded / original)|.
    """
    v, inverse = to_float32(elements, "second moments"), float(np.float32(1 / step))
    if library := compiled.library():
        quotients = scratch("quotients", v.shape)
        constants = inverse, step << 23, compiled.DTYPES[elements.dtype]
        library.log_levels(v, *logs, *factors, *constants, *v.shape, levels, decoded, quotients, row_sizes)
    else:
        same = v == 0
        positive = np.where(same, np.float32(1), v)  # any number with a logarithm: zeros become `SAME`
        numbers = to_levels((_log2(positive) - logs[0][:, None] - logs[1]) * np.float32(inverse))
        values = rounded_to(elements.dtype, _values(numbers, factors, step))
        place_levels(numbers, same, np.zeros_like(v), 0.0, levels, row_sizes)
        decoded[:] = values * ~same
        # A negative element may decode to a negative number, so that their quotient would look right.
        quotients = np.where(positive < 0, np.float32(0), values / positive)
    # The levels were added to `row_sizes` before their errors were known: subtract those that become `EXACT`.
    misfits, largest_error = _misfits(quotients, step / 2 + _LOG_SLACK)
    misfit_levels = levels.reshape(-1)[misfits]
    sizes = np.abs(misfit_levels.astype(np.float64)) * (misfit_levels != SAME)
    np.subtract.at(row_sizes, misfits // levels.shape[1], sizes)
    levels.reshape(-1)[misfits] = EXACT
    decoded.reshape(-1)[misfits] = v.reshape(-1)[misfits]
    return len(misfits), largest_error


def _log2(x: np.ndarray) -> np.ndarray:
    """Return log2 to within 8e-6, with the same bits on every machine. Numbers that are not positive give anything.

    x is 2**exponent * (1 + r) with 1 + r from 2/3 to 4/3, so log2(x) is exponent + log2(1 + r).
    """
    is_small = x < _TINY
    bits = np.where(is_small, x * np.float32(2**32), x).view(np.int32)
    above = bits - np.int32(0x3F2AAAAB)  # the bits of 2/3; the exponent is in the highest bits of the difference
    r = (bits - (above & np.int32(-1 << 23))).view(np.float32) - np.float32(1)
    total = np.full_like(r, _LOG2[-1])
    for coefficient in _LOG2[-2::-1]:
        total = total * r + coefficient
    return total * r + ((above >> 23).astype(np.float32) - np.float32(32) * is_small)


def _values(levels: np.ndarray, factors: Vectors, step: int) -> np.ndarray:
    """Decode levels, in float32 [r, c]. The arithmetic and its order are part of the file format.

    2**(level * step) is put together from the bits of its exponent, which wrap around. A power outside float32's normal
    range decodes to nonsense, which does no harm: the encoder has stored its element exactly.
    """
    bits = np.int32(127 << 23) + levels.astype(np.int32) * np.int32(step << 23)
    return bits.view(np.float32) * factors[0][:, None] * factors[1]


def _factors(row_means: Tensor, column_means: Tensor) -> Vectors:
    """Return P(mean), which is 2**(mean / 128), for rows, float32 [R], and columns, float32 [C]."""
    rows, columns = (
        ((means >> 7 << 23) + _mantissas()[means & 127].view(torch.int32)).view(torch.float32).numpy()
        for means in (row_means, column_means)
    )
    return rows, columns


@cache
def _mantissas() -> Tensor:
    """Return M(k), which is 2**(k/128) cut down to 23 bits after the point, for k = 0 ... 127: float32 [128].

    M is the same on every machine: no power but the first, 1, is nearer than 2**-39 to a multiple of 2**-23.
    """
    return torch.from_numpy(np.floor(np.exp2(np.arange(128) / 128) * 2**23) / 2**23).to(torch.float32)


def _misfits(quotients: np.ndarray, limit: float) -> tuple[np.ndarray, float]:
    """Return the flat positions where |log2| exceeds the limit or is NaN, int64 [m], and the largest other |log2|."""
    lowest, highest = float(quotients.min()), float(quotients.max())
    if lowest > 0:  # usually nothing exceeds the limit, which the logarithms of two numbers show
        largest_error = max(-math.log2(lowest), math.log2(highest))
        if largest_error <= limit:
            return np.empty(0, np.int64), largest_error
    errors = np.abs(np.log2(quotients))
    fits = errors <= limit
    return np.flatnonzero(~fits), float(errors[fits].max(initial=0.0))


@dataclass(frozen=True)
class UpdateSpace(Codec):
    """Rounds exp_avg / sqrt(exp_avg_sq) to a uniform step.

    The bound is the largest |decoded - original| / sqrt(exp_avg_sq). If exp_avg_sq is zero, the element is exact.

    Args:
        step: Distance of two levels in units of sqrt(exp_avg_sq), between 2**-10 and 2**10.

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
            raise ConfigError(f"{self.codec_id}, step", allowed, repr(self.step), "Usual are 0.25 and 0.5.")

    def _encode(self, tensor: Tensor, references: References) -> EncodedTensor:
        if "exp_avg_sq" not in references:
            next_step = "Pass the decoded exp_avg_sq, or use a lossless codec."
            raise ConfigError(f"codec {self.codec_id}, references", "exp_avg_sq", "nothing", next_step)
        shape = matrix_shape(tensor.shape)
        second_moments, encoder = references["exp_avg_sq"].view(shape), TileEncoder(tensor, self.step)
        for tile in tiles(*shape):
            encoder.add(tile, self._squares(second_moments[tile]))
        return encoder.finish()

    @staticmethod
    def _squares(elements: Tensor) -> Tensor:
        """Return numbers whose roots are the unit, given elements of the reference."""
        return elements

    @classmethod
    def _squares_of(cls, reference: Tensor, rows: Rows, columns: slice) -> Placed:
        """Return such numbers as float32, given the reference and the rows and columns of a tile."""
        return rows_of(reference, rows, columns, "v")

    @classmethod
    @np.errstate(all="ignore")
    def _decode(
        cls, payloads: Sequence[Tensor], params: Params, shape: torch.Size, dtype: torch.dtype, references: References
    ) -> Tensor:
        step = cls.param(params, "step", float, _SMALLEST_UPDATE_STEP, _LARGEST_UPDATE_STEP)
        second_moments = cls.needed(references, "exp_avg_sq").view(matrix_shape(shape))
        cls.check_count(payloads, 2)

        def decode(rows: Rows, columns: slice, levels: np.ndarray, out: Placed) -> None:
            # The arithmetic and its order are part of the file format.
            v = cls._squares_of(second_moments, rows, columns)
            if library := compiled.library():
                library.update_decode(levels, *v, step, *levels.shape, *out)
            else:
                fill(out, levels * _unit(dense(v), step))

        return decode_tiles(cls, payloads, shape, dtype, decode)


class TileEncoder:
    """Encodes a contiguous CPU tensor of first moments, tile by tile, as the decoded second moments arrive."""

    def __init__(self, tensor: Tensor, step: float):
        self._writer, self._step = LevelWriter(tensor), float(np.float32(step))

    @np.errstate(all="ignore")
    def add(self, tile: Tile, second_moments: Tensor) -> None:
        """Encode the next one of `tiles`, given its decoded second moments, [r, c]."""
        self._writer.write(tile, partial(_encode_first, second_moments, self._step))

    def finish(self) -> EncodedTensor:
        """Return the encoded tensor, after the last tile."""
        # The errors were measured in steps as float32 quotients. Rounding made some of these denormals or zero.
        bound = (self._writer.bound + _TINY) * self._step * (1 + 2**-20)
        return EncodedTensor(self._writer.payloads(), {"step": self._step}, bound)


def _encode_first(
    second_moments: Tensor, step: float, elements: Tensor, levels: np.ndarray, row_sizes: np.ndarray
) -> tuple[int, float]:
    """Encode a tile of first moments for `LevelWriter.write`. Errors are in units of t, the distance of two levels."""
    m, v = to_float32(elements, "m"), to_float32(second_moments, "v")
    if library := compiled.library():
        largest_error, dtype = ctypes.c_float(), compiled.DTYPES[elements.dtype]
        results = levels, row_sizes, ctypes.addressof(largest_error)
        return library.update_levels(m, v, step, _UPDATE_LIMIT, dtype, *m.shape, *results), largest_error.value
    t = _unit(v, step)
    divisor = np.where(t < _TINY, np.float32(_TINY), t)
    numbers = to_levels(m / divisor)
    errors = np.abs(rounded_to(elements.dtype, numbers * t) - m) / divisor
    # If t is zero or denormal, the errors were divided by another number, so only an m of zero may have a level.
    errors[(t < _TINY) & (m != 0)] = np.inf
    return place_levels(numbers, np.zeros(m.shape, bool), errors, _UPDATE_LIMIT, levels, row_sizes)


def _unit(v: np.ndarray, step: float) -> np.ndarray:
    """Return t, the distance of two levels; numpy rounds every root correctly, torch (2.13, MKL) five of six."""
    return np.sqrt(v) * np.float32(step)
