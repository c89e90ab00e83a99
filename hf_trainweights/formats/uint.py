"""uint2 to uint6: asymmetric codes of 2 to 6 bits, with a scale and a zero point of 4 bits for each group of a row.

| tensor | shape | dtype |
|---|---|---|
| `qdata` | `[*, N, K // 32 * bits]` | int32 words of codes 0 to 2**bits - 1, packed as in `planes` |
| `scale` | `[*, N, 1]` | the weight's dtype |
| `group_scale` | `[*, N, K // group_size // 2]` | uint8, two groups a byte, the first in the low bits |
| `zero_point` | `[*, N, K // group_size // 2]` | uint8, as `group_scale` |

`weight = (code * code_units - zero_point * zero_units) * (group_scale + 1) * scale`. The two units (`uint_search.Grid`)
are whole numbers that spread the 16 zero points over all codes, so that every factor but `scale` is a small integer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_trainweights.formats.arithmetic import float32_blocks, reciprocal, scale_codes
from hf_trainweights.formats.base import Format, Specs
from hf_trainweights.formats.columns import ColumnCodes
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.planes import COLUMNS, codes_of_planes, pack_planes, unpack_planes
from hf_trainweights.formats.uint_search import (
    PARAMETERS,
    Grid,
    encode,
    encode_packed,
    ends_of,
    row_scale,
    search,
    side_by_side,
)
from hf_trainweights.formats.unpacked import Unpacked, nibbles_of, octets_of

GROUP_SIZES = (16, 32)


@dataclass(frozen=True)
class UInt(Format):
    """Asymmetric codes of a few bits, in groups of `group_size` weights along K.

    Args:
        group_size: Weights that share a scale and a zero point: 16 or 32.

    Raises:
        ConfigError: `group_size` is neither.
    """

    tensor_names: ClassVar[tuple[str, ...]] = ("qdata", "scale", "group_scale", "zero_point")
    grid: ClassVar[Grid]
    group_size: int = 16

    def __post_init__(self) -> None:
        self.check_group_size(GROUP_SIZES, "16 is the most exact, 32 takes a quarter of a bit less.")

    @property
    def column_step(self) -> int:
        """The columns of two groups, whose group scales share a byte."""
        return 2 * self.group_size

    def fallback(self, shape: Sequence[int]) -> Format:
        """Return this format if two groups divide K, else groups of 16 if 32 does, else int8 with one scale a row."""
        *_, N, K = shape
        sizes = (self.group_size, GROUP_SIZES[0])
        fitting = (size for size in sizes if N > 1 and K > 1 and K % COLUMNS == 0 and K % (2 * size) == 0)
        size = next(fitting, None)
        return Int8() if size is None else type(self)(size)

    def tensor_specs(self, shape: Sequence[int], scale_dtype: torch.dtype) -> Specs:
        """Return words of codes, a scale for each row, and two tensors of one byte for each two groups."""
        *lead, K = shape
        pairs = ((*lead, K // self.group_size // 2), torch.uint8)
        return {
            "qdata": ((*lead, K // COLUMNS * self.grid.bits), torch.int32),
            "scale": ((*lead, 1), scale_dtype),
            "group_scale": pairs,
            "zero_point": pairs,
        }

    def shape_of(self, qdata: Tensor) -> tuple[int, ...]:
        """Return `[*, N, K]`, 32 columns for as many words as a code has bits."""
        return (*qdata.shape[:-1], qdata.shape[-1] // self.grid.bits * COLUMNS)

    def quantize_rows(self, rows: Tensor, amax: Tensor, out: Mapping[str, Tensor]) -> None:
        """Search the group scales and zero points, and fill the codes for them."""
        del amax
        for block, values in float32_blocks(rows):
            groups, ends = side_by_side(values, self.group_size)
            scale = out["scale"][block].copy_(row_scale(self.grid, ends.view(2, len(values), -1), rows.dtype))
            inverse = reciprocal(scale).expand(-1, groups.shape[1] // len(values)).flatten()
            # `steps` are the group scales in units of the row's scale, 1 to 16. Stored are 0 to 15.
            steps, zeros = search(self.grid, groups.mul_(inverse), ends.mul_(inverse))
            limit = torch.finfo(rows.dtype).max * inverse
            out["qdata"][block].copy_(encode_packed(self.grid, groups, steps, zeros, limit).view(len(values), -1))
            out["group_scale"][block].copy_(_pack_pairs(steps.sub_(1).view(len(values), -1)))
            out["zero_point"][block].copy_(_pack_pairs(zeros.view(len(values), -1)))

    def columns(self, weight: Tensor, importance: Tensor) -> ColumnCodes:
        """Return an object that chooses codes column by column, with the row scales of `quantize_rows`."""
        return _Columns(self, weight, importance)

    def unpack(self, tensors: Mapping[str, Tensor]) -> Unpacked:
        """Return codes, 0 to 2**bits - 1, zero points, and the scale of each group."""
        grid, codes = self.grid, codes_of_planes(octets_of(tensors["qdata"]), self.grid.bits)
        zeros, steps = (nibbles_of(tensors[name]) for name in ("zero_point", "group_scale"))
        scale = (steps + 1) * tensors["scale"].to(torch.float32)
        limits = (0, (2**grid.bits - 1) * grid.code_units)
        return Unpacked(codes, scale, limits, unit=grid.code_units, zeros=zeros * grid.zero_units)

    def dequantize_rows(self, tensors: Mapping[str, Tensor], K: int, dtype: torch.dtype) -> Tensor:
        """Return the difference of code and zero point, in units, times the scale of the group."""
        del K
        codes = unpack_planes(tensors["qdata"], self.grid.bits).view(torch.int8).mul_(self.grid.code_units)
        zeros = unpack_pairs(tensors["zero_point"]).mul_(self.grid.zero_units)
        steps = unpack_pairs(tensors["group_scale"]).add_(1) * tensors["scale"].float()
        groups = codes.unflatten(-1, (-1, self.group_size)).sub_(zeros.unsqueeze(-1))
        return scale_codes(groups, steps.unsqueeze(-1), dtype).flatten(-2)


@dataclass(frozen=True)
class UInt2(UInt):
    """Codes of 2 bits."""

    name: ClassVar[str] = "uint2"
    grid: ClassVar[Grid] = Grid(bits=2, code_units=5, zero_units=1, clippings=(0.95, 0.8, 0.65, 0.5))


@dataclass(frozen=True)
class UInt3(UInt):
    """Codes of 3 bits."""

    name: ClassVar[str] = "uint3"
    grid: ClassVar[Grid] = Grid(bits=3, code_units=2, zero_units=1, clippings=(1.0, 0.88, 0.77, 0.66))


@dataclass(frozen=True)
class UInt4(UInt):
    """Codes of 4 bits."""

    name: ClassVar[str] = "uint4"
    grid: ClassVar[Grid] = Grid(bits=4, code_units=1, zero_units=1, clippings=(1.0, 0.93, 0.86, 0.79))


@dataclass(frozen=True)
class UInt5(UInt):
    """Codes of 5 bits."""

    name: ClassVar[str] = "uint5"
    grid: ClassVar[Grid] = Grid(bits=5, code_units=1, zero_units=2, clippings=(1.04, 0.96, 0.88))


@dataclass(frozen=True)
class UInt6(UInt):
    """Codes of 6 bits."""

    name: ClassVar[str] = "uint6"
    grid: ClassVar[Grid] = Grid(bits=6, code_units=1, zero_units=4, clippings=(1.05, 1.0, 0.95))


class _Columns(ColumnCodes):
    """Chooses the codes, group scales and zero points of one weight; group scales and zero points are `[G, N]`."""

    def __init__(self, form: UInt, weight: Tensor, importance: Tensor):
        N, K = weight.shape
        self.group_size = self._size = form.group_size
        self._grid, self._importance = form.grid, importance
        groups = weight.float().view(-1, form.group_size).t()
        self._scale = row_scale(form.grid, ends_of(groups).view(2, N, -1), weight.dtype)
        self._inverse, self._factor = reciprocal(self._scale).flatten(), self._scale.float().flatten()
        self._limit = torch.finfo(weight.dtype).max * self._inverse
        self._steps = importance.new_empty((K // form.group_size, N))
        self._zeros = torch.empty_like(self._steps)
        self._codes = weight.new_empty((K, N), dtype=torch.uint8)

    def begin_group(self, group: int, values: Tensor) -> None:
        """Choose the group scale and the zero point with the smallest squared error."""
        groups, first = values * self._inverse, group * len(values)
        importance = self._importance[first : first + len(values)]
        self._steps[group], self._zeros[group] = search(self._grid, groups, ends_of(groups), importance)

    def encode(self, column: int, values: Tensor) -> Tensor:
        """Choose the nearest codes."""
        grid, group = self._grid, column // self._size
        steps, zeros = self._steps[group], self._zeros[group]
        codes = encode(grid, (values * self._inverse).unsqueeze(0), steps, zeros, self._limit)[0]
        self._codes[column] = codes
        return codes.mul_(grid.code_units).sub_(zeros * grid.zero_units).mul_(steps).mul_(self._factor)

    def tensors(self) -> dict[str, Tensor]:
        """Return packed codes, the scales of rows, and packed group scales and zero points."""
        return {
            "qdata": pack_planes(self._codes.t().contiguous(), self._grid.bits),
            "scale": self._scale,
            "group_scale": _pack_pairs(self._steps.t().contiguous() - 1),
            "zero_point": _pack_pairs(self._zeros.t().contiguous()),
        }


def _pack_pairs(values: Tensor) -> Tensor:
    """Pack float values 0 to 15, `[n, G]`, two to a byte, the first in the low bits."""
    low, high = values.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return high.bitwise_left_shift(4).bitwise_or_(low)


def unpack_pairs(pairs: Tensor) -> Tensor:
    """Unpack bytes of two numbers, uint8 `[*, G // 2]`, to int8 `[*, G]`."""
    return torch.stack((pairs & (PARAMETERS - 1), pairs >> 4), dim=-1).flatten(-2).view(torch.int8)
