"""`update-space`: Adam's exp_avg m in units of sqrt(exp_avg_sq), by which Adam divides it in an update.

With v the DECODED exp_avg_sq and t = sqrt(v) * step, all float32, each operation rounded once:

| | |
|---|---|
| encode | level q = round(m / t) |
| decode | q * t, then rounded to the tensor's dtype |

So an error of step / 2 changes the next update of that weight by at most step / 2 learning rates, whatever the
size of m. An element that is not finite, or not zero where v is zero, or too far away is stored as it is (see
`levels`).

The payloads are those of `levels`.

| parameter | content |
|---|---|
| step | float, exact in float32 |
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
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
    tiles,
    to_float32,
)
from hf_trainweights.checkpoint.codecs.coding.levels import LevelWriter, decode_tiles, place_levels, to_levels
from hf_trainweights.errors import ConfigError

# In units of the step. Rounding gives 1/2, and the tensor's dtype a little more.
_LIMIT = 0.75
_SMALLEST_STEP, _LARGEST_STEP = 2.0**-10, 2.0**10
_TINY = torch.finfo(torch.float32).tiny


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
        if not _SMALLEST_STEP <= self.step <= _LARGEST_STEP:
            allowed = f"a number from {_SMALLEST_STEP} to {_LARGEST_STEP}"
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
        step = cls.param(params, "step", float, _SMALLEST_STEP, _LARGEST_STEP)
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
        self._writer.write(tile, partial(_encode_tile, squares, self._step))

    def finish(self) -> EncodedTensor:
        """Return the tensor when all tiles are encoded."""
        # The quotients are rounded to float32, some of them to denormals or zero.
        bound = (self._writer.bound + _TINY) * self._step * (1 + 2**-20)
        return EncodedTensor(self._writer.payloads(), {"step": self._step}, bound)


def _encode_tile(
    squares: Tensor, step: float, elements: Tensor, levels: np.ndarray, row_sizes: np.ndarray
) -> tuple[int, float]:
    """Do as `place_levels` says; errors are in units of the step."""
    m, v = to_float32(elements, "m"), to_float32(squares, "squares")
    if library := compiled.library():
        worst, dtype = ctypes.c_float(), compiled.DTYPES[elements.dtype]
        results = levels, row_sizes, ctypes.addressof(worst)
        return library.update_levels(m, v, step, _LIMIT, dtype, *m.shape, *results), worst.value
    unit = _unit(v, step)
    divisor = np.where(unit < _TINY, np.float32(_TINY), unit)
    numbers = to_levels(m / divisor)
    errors = np.abs(rounded_to(elements.dtype, numbers * unit) - m) / divisor
    # Here the divisor is not the unit, which is zero: accept nothing but zero.
    errors[(unit < _TINY) & (m != 0)] = np.inf
    return place_levels(numbers, np.zeros(m.shape, bool), errors, _LIMIT, levels, row_sizes)


def _unit(squares: np.ndarray, step: float) -> np.ndarray:
    """Return the distance of two levels; numpy rounds the root correctly, torch (2.13, MKL) in five cases of six."""
    return np.sqrt(squares) * np.float32(step)
