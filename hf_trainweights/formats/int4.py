"""int4: four bits a weight, symmetric, one scale for each group of a row.

| tensor | shape | dtype |
|---|---|---|
| `qdata` | `[*, N, K // 8]` | int32 words of eight codes -8 to 7, packed as in `packing` |
| `scale` | `[*, N, K // group_size]` | the weight's dtype; may be negative |

`weight = code * scale`. The sign of the scale gives the extra code -8 to the longer tail of the group. The scale is the
one with the smallest squared error among four clippings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_trainweights.formats.arithmetic import (
    float32_blocks,
    largest_magnitude,
    reciprocal,
    round_scale,
    scale_codes,
)
from hf_trainweights.formats.base import Format, Specs, TargetGroups
from hf_trainweights.formats.columns import ColumnCodes
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.packing import CODES_PER_WORD, pack_int4, unpack_int4
from hf_trainweights.formats.unpacked import Unpacked, nibbles_of, octets_of

GROUP_SIZES = (32, 64, 128)

# The scales to try for a group: its largest magnitude divided by each of these. By 7.5 all weights fit codes -8 to 7; a
# larger divisor gives a smaller scale, which is finer for most weights and clips the largest ones. On the Linears of
# MiniLM-L6 these four give 19.52 / 20.30 / 21.26 dB at groups of 128 / 64 / 32. Two clippings with both signs of the
# scale give 19.45 and 21.20 dB at groups of 128 and 32, plain absmax (7 alone) 17.89 and 19.85 dB. The first wins a
# tie: if the squares of the errors overflow, or underflow to zero, that must be the one that clips least.
_CLIPPINGS = (7.5, 8.0, 8.5, 9.0)


@dataclass(frozen=True)
class Int4(Format):
    """Symmetric int4 with one scale per group of `group_size` weights along K.

    Args:
        group_size: Weights that share a scale: 32, 64 or 128.

    Raises:
        ConfigError: `group_size` is none of these.
    """

    name: ClassVar[str] = "int4"
    # GGUF has blocks of 32 weights.
    groups_for_targets: ClassVar[TargetGroups] = {
        "gguf": (32,),
        "compressed-tensors": GROUP_SIZES,
    }
    group_size: int = 128

    def __post_init__(self) -> None:
        self.check_group_size(GROUP_SIZES, "32 is the most exact, 128 the smallest.")

    def fallback(self, shape: Sequence[int]) -> Format:
        """Return this format, or int8 with one scale a row if groups do not divide K, or N or K is at most 1."""
        *_, N, K = shape
        return self if N > 1 and K > 1 and K % self.group_size == 0 else Int8()

    def tensor_specs(self, shape: Sequence[int], scale_dtype: torch.dtype) -> Specs:
        """Return `qdata` as `[*, N, K // 8]` int32 and `scale` as `[*, N, K // group_size]`."""
        *lead, K = shape
        return {
            "qdata": ((*lead, K // CODES_PER_WORD), torch.int32),
            "scale": ((*lead, K // self.group_size), scale_dtype),
        }

    def shape_of(self, qdata: Tensor) -> tuple[int, ...]:
        """Return `[*, N, K]`, eight columns for each word."""
        return (*qdata.shape[:-1], qdata.shape[-1] * CODES_PER_WORD)

    def quantize_rows(self, rows: Tensor, amax: Tensor, out: Mapping[str, Tensor]) -> None:
        """Choose the clipping with the smallest squared error, and fill codes `round(w * (1 / scale))`."""
        groups = rows.view(*amax.shape, -1)
        scale = out["scale"].copy_(_best(groups, _candidates(groups, amax, rows.dtype)))
        inverse, scratch = reciprocal(scale).unsqueeze(-1), amax.new_empty(0)
        for block, values in float32_blocks(groups):
            codes = _encode(values, inverse[block], scratch.resize_(values.shape))
            out["qdata"][block].copy_(pack_int4(codes.flatten(1)))

    def columns(self, weight: Tensor, importance: Tensor) -> ColumnCodes:
        """Return an object that chooses codes column by column, with the clippings of `quantize_rows`."""
        return _Columns(self.group_size, weight, importance)

    def unpack(self, tensors: Mapping[str, Tensor]) -> Unpacked:
        """Return codes, -8 to 7, and scales."""
        codes = nibbles_of(octets_of(tensors["qdata"])) - 8
        return Unpacked(codes, tensors["scale"], limits=(-8, 7))

    def dequantize_rows(self, tensors: Mapping[str, Tensor], K: int, dtype: torch.dtype) -> Tensor:
        """Return the unpacked codes times their scale."""
        codes, scale = unpack_int4(tensors["qdata"]), tensors["scale"]
        groups = codes.unflatten(-1, (scale.shape[-1], self.group_size))
        return scale_codes(groups, scale.unsqueeze(-1), dtype).view(*codes.shape[:-1], K)


class _Columns(ColumnCodes):
    """Chooses the codes and scales of one weight."""

    def __init__(self, group_size: int, weight: Tensor, importance: Tensor):
        N, K = weight.shape
        self.group_size, self._importance = group_size, importance
        self._scale = weight.new_empty((N, K // group_size))
        self._codes = weight.new_empty((K, N), dtype=torch.int8)

    def begin_group(self, group: int, values: Tensor) -> None:
        """Choose the scale with the smallest squared error."""
        groups, first = values.t().unsqueeze(1).contiguous(), group * len(values)
        candidates = _candidates(groups, largest_magnitude(groups), self._scale.dtype)
        scale = _best(groups, candidates, self._importance[first : first + len(values)]).flatten()
        self._scale[:, group] = scale
        self._factor, self._inverse = scale.float(), reciprocal(scale)

    def encode(self, column: int, values: Tensor) -> Tensor:
        """Choose the nearest codes."""
        codes = (values * self._inverse).round_().clamp_(-8, 7)
        self._codes[column] = codes
        return codes.mul_(self._factor)

    def tensors(self) -> dict[str, Tensor]:
        """Return packed codes and scales."""
        return {"qdata": pack_int4(self._codes.t().contiguous()), "scale": self._scale}


def _candidates(groups: Tensor, amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scales to try for each group, one for each clipping, `[tries, n, G]`."""
    divisors = torch.tensor(_CLIPPINGS, dtype=torch.float32, device=groups.device).view(-1, 1, 1)
    return round_scale(amax / divisors, 8, dtype) * _signs(groups, amax)


def _signs(groups: Tensor, amax: Tensor) -> Tensor:
    """Return the sign of each group's scale: 1 if its lowest value has the largest magnitude, else -1."""
    lowest = torch.empty_like(amax)
    for block, values in float32_blocks(groups):
        torch.amin(values, dim=-1, out=lowest[block])
    return torch.where(lowest == -amax, 1, -1)


def _best(groups: Tensor, candidates: Tensor, importance: Tensor | None = None) -> Tensor:
    """Return the candidate `[tries, n, G]` with the smallest squared error for each group `[n, G, g]`.

    The first of equal ones wins. `importance` `[g]` weighs the squared error of each column.
    """
    inverses, factors = reciprocal(candidates).unsqueeze(-1), candidates.float().unsqueeze(-1)
    errors = torch.empty_like(candidates, dtype=torch.float32)
    scratch = errors.new_empty(0)
    for block, values in float32_blocks(groups):
        scratch.resize_(values.shape)
        for inverse, factor, error in zip(inverses[:, block], factors[:, block], errors[:, block], strict=True):
            difference = _encode(values, inverse, scratch).mul_(factor).sub_(values)
            squares = difference.square_() if importance is None else difference.square_().mul_(importance)
            torch.sum(squares, dim=-1, out=error)
    best, smallest = candidates[0], errors[0]
    for candidate, error in zip(candidates[1:], errors[1:], strict=True):
        better = error < smallest
        best, smallest = torch.where(better, candidate, best), torch.where(better, error, smallest)
    return best


def _encode(values: Tensor, inverse: Tensor, out: Tensor) -> Tensor:
    return torch.mul(values, inverse, out=out).round_().clamp_(-8, 7)
