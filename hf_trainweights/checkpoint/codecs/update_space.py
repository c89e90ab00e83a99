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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import LOSSY_DTYPES, Codec, EncodedTensor, Json, References
from hf_trainweights.checkpoint.codecs.coding import compiled
from hf_trainweights.checkpoint.codecs.coding.levels import LevelWriter, clip_, put, read_levels, work_tiles
from hf_trainweights.checkpoint.codecs.coding.tiles import (
    Tile,
    empty,
    matrix_shape,
    round_to_,
    scratch,
    split_misfits,
    to_float32,
    work_in,
)
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

    @np.errstate(all="ignore")
    def _encode(self, tensor: Tensor, references: References) -> EncodedTensor:
        if "exp_avg_sq" not in references:
            next_step = "Pass the decoded exp_avg_sq, or use a lossless codec."
            raise ConfigError("codec update-space, references", "exp_avg_sq", "nothing", next_step)
        step = float(np.float32(self.step))
        shape = matrix_shape(tensor.shape)
        original, squares = tensor.view(shape), references["exp_avg_sq"].view(shape)
        writer = LevelWriter(*shape)
        bound = 0.0
        for tile in work_tiles(*shape):
            bound = max(bound, _write_levels(writer, tile, original[tile], squares[tile], step))
        # The quotients are rounded to float32, some of them to denormals or zero.
        bound = (bound + _TINY) * step * (1 + 2**-20)
        return EncodedTensor(writer.payloads(tensor.dtype), {"step": step}, bound)

    @classmethod
    @np.errstate(all="ignore")
    def _decode(
        cls,
        payloads: Sequence[Tensor],
        params: Mapping[str, Json],
        shape: torch.Size,
        dtype: torch.dtype,
        references: References,
    ) -> Tensor:
        step = cls.param(params, "step", float)
        if not _SMALLEST_STEP <= step <= _LARGEST_STEP:
            raise cls.corrupt("parameter step", f"{_SMALLEST_STEP} to {_LARGEST_STEP}", repr(step))
        squares = cls.needed(references, "exp_avg_sq").view(matrix_shape(shape))
        cls.check_count(payloads, 2)
        tile_levels = read_levels(cls, payloads, shape, dtype)
        out = empty(matrix_shape(shape), dtype)
        for tile, levels in tile_levels:
            decoded = work_in(out[tile], "decoded")
            if compiled.is_available():
                compiled.update_decode(levels.stored, to_float32(squares[tile], "squares"), step, decoded)
            else:
                levels.write_to(decoded)
                decoded *= _unit(squares[tile], step)
            put(decoded, out[tile], levels.exact, levels.elements)
        return out.view(shape)


def _write_levels(writer: LevelWriter, tile: Tile, elements: Tensor, squares: Tensor, step: float) -> float:
    """Encode a tile, and return the largest error of an element that has a level, in units of the step."""
    m = to_float32(elements, "m")
    if compiled.is_available():
        numbers = to_float32(squares, "squares"), step, _LIMIT, elements.dtype
        missed, worst = compiled.update_levels(m, *numbers, writer.place(tile))
        if missed:
            writer.keep_exact(tile, elements)
        return worst
    unit = _unit(squares, step)
    is_tiny = not unit.min() >= _TINY
    divisor = np.maximum(unit, _TINY, out=scratch("divisor", unit.shape)) if is_tiny else unit
    levels, errors = scratch("levels", m.shape), scratch("errors", m.shape)
    np.divide(m, divisor, out=levels)
    clip_(np.rint(levels, out=levels))
    np.multiply(levels, unit, out=errors)
    round_to_(errors, elements.dtype)
    errors -= m
    errors /= divisor
    if is_tiny:
        # Here the divisor is not the unit, which is zero: accept nothing but zero.
        errors.reshape(-1)[np.flatnonzero((unit < _TINY) & (m != 0))] = np.inf
    misfit, worst = split_misfits(errors, _LIMIT)
    writer.write(tile, levels, elements, misfit)
    return worst


def _unit(squares: Tensor, step: float) -> np.ndarray:
    """Return the float32 distance of two levels; the arithmetic is part of the format.

    numpy's square root is the processor's, correctly rounded; torch's (2.13, MKL) is not, in one case of six, and
    ten times slower on zeros.
    """
    unit = np.sqrt(to_float32(squares, "squares"), out=scratch("unit", squares.shape))
    unit *= np.float32(step)
    return unit
