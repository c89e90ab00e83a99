"""The search for the group scale and zero point of each group in `uint`, 16 of each, and the codes for them.

It looks for the smallest squared error. Tensors are `[group_size, n]`: each column is one of n groups. A group scale is
a number from 1 to 16 here, a multiple of the row's scale; `uint` stores it less 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_trainweights.formats.arithmetic import SMALLEST_SCALE, add_by_halves
from hf_trainweights.formats.compiled_search import encode_uint, lay_side_by_side, search_uint, serves
from hf_trainweights.formats.planes import COLUMNS, pack_planes

PARAMETERS = 16
"""The number of group scales, which is also the number of zero points."""


class Grid(NamedTuple):
    """The values of codes and zero points for one number of bits, and the first group scales to try.

    Args:
        bits: Bits of a code.
        code_units: The distance of two neighbouring codes, as a multiple of the group scale.
        zero_units: The distance of two neighbouring zero points, as a multiple of the group scale.
        clippings: Shares of a group's range. The search first tries the group scales whose codes cover these shares.
    """

    bits: int
    code_units: int
    zero_units: int
    clippings: tuple[float, ...]

    @property
    def largest_code(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def units(self) -> tuple[int, int, int]:
        """The numbers of a grid that the functions in C take."""
        return self.bits, self.code_units, self.zero_units


def side_by_side(values: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return float32 values as groups `[group_size, n]`, in new memory, and the `ends_of` these groups, `[2, n]`."""
    if serves(values):
        return lay_side_by_side(values, group_size)
    # The groups become columns, so that a computation for all groups is one operation on whole vectors.
    groups = values.view(-1, group_size).t().contiguous()
    return groups, ends_of(groups)


def ends_of(groups: Tensor) -> Tensor:
    """Return the ends of each group `[2, n]`: its least value, at most 0, and its largest, at least 0."""
    return torch.stack((groups.amin(dim=0).clamp_max_(0), groups.amax(dim=0).clamp_min_(0)))


def row_scale(grid: Grid, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale `[rows, 1]` of each row, such that the largest group scale, 16 times it, covers every group.

    A scale has two significant bits, is 1 or 1.5 times a power of two, so that its multiples have few bits. `ends`
    `[2, rows, G]` is the result of `ends_of`.
    """
    low, high = ends / (grid.largest_code * grid.code_units)
    wanted = (high - low).amax(dim=-1, keepdim=True) / PARAMETERS
    fraction, exponent = torch.frexp(wanted.clamp_min(SMALLEST_SCALE[dtype]))
    up = torch.where(fraction > 0.75, 1.0, torch.where(fraction > 0.5, 0.75, 0.5))
    return torch.ldexp(up, exponent.to(torch.float32)).to(dtype).masked_fill_(wanted == 0, 0)


def search(grid: Grid, groups: Tensor, ends: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the group scales and zero points with the smallest squared error among those tried.

    The search tries each clipping, with the codes centred on the middle of the range. Then it tries the two group
    scales next to the best one, then the two zero points next to the best one. `groups` and `ends` `[2, n]` are in
    units of the row's scale. `importance` `[group_size]` weighs the squared error of each weight of a group.
    """
    low, high = ends
    covering, middle = (high - low) / (grid.largest_code * grid.code_units), (high + low) / 2
    if serves(groups):
        scale, zero = search_uint(groups, covering, middle, importance, grid.units, grid.clippings)
        return scale, zero.masked_fill_(covering == 0, 0)
    best = _Best(grid, groups, importance)
    for clipping in grid.clippings:
        best.try_scale(covering * clipping, middle)
    scale = best.scale
    for step in (-1, 1):
        best.try_scale(scale + step, middle)
    zero = best.zero
    for step in (-1, 1):
        best.try_zero(best.scale, (zero + step).clamp_(0, PARAMETERS - 1))
    return best.scale, best.zero.masked_fill_(covering == 0, 0)


class _Best:
    """The best group scales and zero points so far; the first of equal ones wins."""

    def __init__(self, grid: Grid, groups: Tensor, importance: Tensor | None):
        self._grid, self._groups = grid, groups
        self._importance = None if importance is None else importance.unsqueeze(-1)
        self._exact, self._rounded = torch.empty_like(groups), torch.empty_like(groups)
        self.scale = self.zero = groups.new_zeros(groups.shape[1])
        self._error = groups.new_full(self.scale.shape, torch.inf)

    def try_scale(self, wanted: Tensor, middle: Tensor) -> None:
        """Try group scales, with the zero points that centre the codes on `middle`."""
        grid = self._grid
        scale = wanted.round().clamp_(1, PARAMETERS)
        below = grid.largest_code / 2 - middle / (scale * grid.code_units)
        self.try_zero(scale, (below * (grid.code_units / grid.zero_units)).round_().clamp_(0, PARAMETERS - 1))

    def try_zero(self, scale: Tensor, zero: Tensor) -> None:
        """Try group scales and zero points; keep them for the groups in which they lower the squared error."""
        exact = _steps(self._grid, self._groups, scale, zero, self._exact)
        rounded = torch.round(exact, out=self._rounded).clamp_(0, self._grid.largest_code)
        squares = exact.sub_(rounded).square_()
        error = add_by_halves(squares if self._importance is None else squares.mul_(self._importance)) * scale.square()
        better = error < self._error
        self._error = torch.where(better, error, self._error)
        self.scale, self.zero = torch.where(better, scale, self.scale), torch.where(better, zero, self.zero)


def encode_packed(grid: Grid, groups: Tensor, scale: Tensor, zero: Tensor, limit: Tensor) -> Tensor:
    """Return the codes of `encode`, packed: int32 `[n * group_size // 32, bits]`."""
    if serves(groups) and not _may_overflow(grid, scale, limit):
        return encode_uint(groups, scale, zero, grid.units)
    codes = encode(grid, groups, scale, zero, limit).to(torch.uint8).t().contiguous()
    return pack_planes(codes.view(-1, COLUMNS), grid.bits)


def encode(grid: Grid, groups: Tensor, scale: Tensor, zero: Tensor, limit: Tensor) -> Tensor:
    """Return the codes of the nearest values within the range of the weight's dtype, which ends at `limit`.

    `groups` and `limit` `[n]` are in units of the row's scale.
    """
    codes = _steps(grid, groups, scale, zero, torch.empty_like(groups)).round_()
    if not _may_overflow(grid, scale, limit):
        return codes.clamp_(0, grid.largest_code)
    # Codes beyond the dtype's range would be dequantized to infinities.
    reach, start = (limit / scale).floor_(), zero * grid.zero_units
    lowest = ((start - reach) / grid.code_units).ceil_().clamp_min_(0)
    highest = ((start + reach) / grid.code_units).floor_().clamp_max_(grid.largest_code)
    return torch.where(limit > 0, codes.clamp(lowest, highest), 0)


def _may_overflow(grid: Grid, scale: Tensor, limit: Tensor) -> bool:
    """Return whether the farthest code of a group lies beyond the range of the weight's dtype."""
    return bool(((limit < grid.largest_code * grid.code_units * scale) & (limit > 0)).any())


def _steps(grid: Grid, groups: Tensor, scale: Tensor, zero: Tensor, out: Tensor) -> Tensor:
    """Fill `out` with the codes as exact numbers, neither rounded nor clamped, and return it."""
    steps = torch.mul(groups, (scale * grid.code_units).reciprocal_(), out=out)
    return steps.add_(zero * (grid.zero_units / grid.code_units))
