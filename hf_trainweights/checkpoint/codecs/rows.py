"""`row-uniform`: rounds a momentum to a uniform step in each row, a part of the row's own root mean square.

Optimizers that keep no second moment have no unit of their own for a momentum: SGD adds it, Lion takes its signs, and
Muon makes its rows and columns orthogonal. There an element counts as far as it is large beside the others, and rows
differ most: the row of an embedding whose word is rare is a thousand times smaller than others.

The tensor is viewed as a matrix [R, C] (see `levels`), a vector as one row. Let s be the root mean square of the finite
elements of a row, rounded to bfloat16. The distance of two levels is t = s * step. All numbers are float32, and each
operation is rounded once:

| | |
|---|---|
| encode | level q = round(m / t) |
| decode | q * t, then rounded to the tensor's dtype; no element is "same" |

So m is off by at most t / 2. An element is stored as it is (see `levels`) if it is not finite, too far away for a
level, or not zero although t is no normal float32.

| payload | content |
|---|---|
| 0, 1 | those of `levels` |
| 2 | s of each row, bfloat16 [R], coded by `planes` |

| parameter | content |
|---|---|
| step | float, exact in float32 |
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
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
    fill,
    matrix_shape,
    rounded_to,
    tiles,
    to_float32,
)
from hf_trainweights.checkpoint.codecs.coding.levels import LevelWriter, decode_tiles, place_levels, to_levels
from hf_trainweights.checkpoint.codecs.exact import Planes
from hf_trainweights.errors import ConfigError

_SMALLEST_STEP, _LARGEST_STEP = 2.0**-10, 2.0**10
# An element that is off by more than this many steps is stored as it is. Rounding to a level gives errors up to 1/2
# step, and rounding to the tensor's dtype adds a little.
_LIMIT = 0.75
# The smallest normal float32.
_TINY = torch.finfo(torch.float32).tiny
# The largest finite bfloat16.
_LARGEST = torch.finfo(torch.bfloat16).max


@dataclass(frozen=True)
class RowUniform(Codec):
    """Rounds each row to a uniform step in parts of its root mean square.

    The bound is the largest |decoded - original| / (the root mean square of the row).

    Args:
        step: Distance of two levels in units of the row's root mean square, between 2**-10 and 2**10.

    Examples:
        >>> import torch
        >>> momentum = torch.randn(64, 64) * torch.logspace(-6, 0, 64)[:, None]
        >>> encoded = RowUniform(step=0.5).encode(momentum)
        >>> 0.24 < encoded.bound < 0.253
        True
    """

    step: float = 0.5

    codec_id: ClassVar[str] = "row-uniform"
    lossless: ClassVar[bool] = False
    roles: ClassVar[tuple[str, ...]] = ("exp_avg", "momentum")
    dtypes: ClassVar[frozenset[torch.dtype]] = LOSSY_DTYPES

    def __post_init__(self) -> None:
        if not _SMALLEST_STEP <= self.step <= _LARGEST_STEP:
            allowed = f"a number from {_SMALLEST_STEP} to {_LARGEST_STEP}"
            raise ConfigError("row-uniform, step", allowed, repr(self.step), "Usual are 0.5 and 1.")

    @np.errstate(all="ignore")
    def _encode(self, tensor: Tensor, references: References) -> EncodedTensor:
        shape, step = matrix_shape(tensor.shape), float(np.float32(self.step))
        scales = _scales(tensor.view(shape))
        units, writer = _units(scales, step), LevelWriter(tensor)
        for tile in tiles(*shape):
            writer.write(tile, partial(_encode_tile, units[tile[0]]))
        # The scale may be so much larger than the root mean square, and errors were measured as float32 quotients.
        bound = (writer.bound + _TINY) * step * (1 + 2**-7)
        payloads = [*writer.payloads(), Planes().encode(scales).payloads[0]]
        return EncodedTensor(payloads, {"step": step}, bound)

    @classmethod
    @np.errstate(all="ignore")
    def _decode(
        cls, payloads: Sequence[Tensor], params: Params, shape: torch.Size, dtype: torch.dtype, references: References
    ) -> Tensor:
        step = cls.param(params, "step", float, _SMALLEST_STEP, _LARGEST_STEP)
        cls.check_count(payloads, 3)

        @cache
        def units() -> np.ndarray:  # first called when `decode_tiles` has checked that the levels fit the shape
            return _units(Planes.decode([payloads[2]], {}, matrix_shape(shape)[:1], torch.bfloat16), step)

        def decode(rows: Rows, columns: slice, levels: np.ndarray, out: Placed) -> None:
            # The arithmetic and its order are part of the file format.
            tile_units = units()[rows]
            if library := compiled.library():
                library.row_decode(levels, np.ascontiguousarray(tile_units), *levels.shape, *out)
            else:
                fill(out, levels * tile_units[:, None])

        return decode_tiles(cls, payloads, shape, dtype, decode)


def _scales(matrix: Tensor) -> Tensor:
    """Return the root mean square of the finite elements of each row, bfloat16 [R], never infinite."""
    squares = torch.zeros(len(matrix), dtype=torch.float64)
    for rows, columns in tiles(*matrix.shape):
        elements = matrix[rows, columns].double().nan_to_num_(0.0, 0.0, 0.0)
        # One sum for each row, so that it does not depend on the number of threads.
        squares[rows] += torch.from_numpy(np.einsum("rc,rc->r", elements.numpy(), elements.numpy()))
    scales = (squares / max(matrix.shape[1], 1)).sqrt_()
    return scales.clamp_(max=_LARGEST).to(torch.bfloat16)


def _units(scales: Tensor, step: float) -> np.ndarray:
    """Return t of each row, float32 [R]."""
    return scales.to(torch.float32).numpy() * np.float32(step)


def _encode_tile(units: np.ndarray, elements: Tensor, levels: np.ndarray, row_sizes: np.ndarray) -> tuple[int, float]:
    """Encode a tile for `LevelWriter.write`. Errors are in units of t."""
    m = to_float32(elements, "m")
    if library := compiled.library():
        largest_error, dtype = ctypes.c_float(), compiled.DTYPES[elements.dtype]
        results = levels, row_sizes, ctypes.addressof(largest_error)
        return library.row_levels(m, units, _LIMIT, dtype, *m.shape, *results), largest_error.value
    t = units[:, None]
    divisor = np.where(t < _TINY, np.float32(_TINY), t)
    numbers = to_levels(m / divisor)
    errors = np.abs(rounded_to(elements.dtype, numbers * t) - m) / divisor
    # If t is zero or denormal, the errors were divided by another number, so only an m of zero may have a level.
    errors[(t < _TINY) & (m != 0)] = np.inf
    return place_levels(numbers, np.zeros(m.shape, bool), errors, _LIMIT, levels, row_sizes)
