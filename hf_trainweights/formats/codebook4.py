"""codebook4: four bits a weight, sixteen fixed values spread as weights are, a scale for each group of 32.

| tensor | shape | dtype |
|---|---|---|
| `qdata` | `[*, N, K // 8]` | int32 words of eight indices 0 to 15, packed as in `packing` |
| `scale` | `[*, N, 1]` | the weight's dtype |
| `group_scale` | `[*, N, bytes]` | uint8, 7 bits a group packed as in `group_scales`: 6 of its factor, then a sign |

`weight = CODEBOOK[index] * (scale * factor)`. The factor is negative if the sign bit is set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_trainweights.formats.arithmetic import (
    add_by_halves,
    float32_blocks,
    largest_magnitude,
    reciprocal,
    round_scale,
)
from hf_trainweights.formats.base import Format, Specs
from hf_trainweights.formats.columns import ColumnCodes
from hf_trainweights.formats.compiled_search import search_codebook, serves
from hf_trainweights.formats.group_scales import (
    FACTORS,
    SCALE_BITS,
    codes_of_bits,
    decode_group_scales,
    encode_group_scales,
    pack_bits,
    packed_bytes,
    unpack_bits,
)
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.packing import CODES_PER_WORD, look_up_nibbles, pack_int4
from hf_trainweights.formats.unpacked import Unpacked, look_up, nibbles_of, octets_of

GROUP_SIZE = 32
GROUP_BITS = SCALE_BITS + 1

# The sixteen values with the least squared error for normally distributed groups of 32 whose scales are searched. They
# come from Lloyd's algorithm with one value held at 0, so that zeros stay zeros. On the Linears of MiniLM-L6, with
# exact scales, they give 22.42 dB. Values fitted to these Linears give 22.43 dB, those of llama.cpp's IQ4 22.34 dB.
CODEBOOK = (-127, -100, -78, -61, -47, -34, -22, -11, 0, 11, 23, 35, 49, 64, 82, 106)
_LARGEST = 127

# The search tries these factors for each group, with both signs. They are steps of 1/8 octave from the factor that maps
# the group's largest magnitude to 127. On these Linears trying both signs gains .11 dB over taking the sign of the
# longer tail, and trying all factors would gain .01 dB more.
_STEPS = (0, -1, 1, -2, 2)
# Room above the largest magnitude for two steps up.
_HEADROOM = 152 / 128

# The value of each index.
_VALUES = torch.tensor(CODEBOOK, dtype=torch.float32, device="cpu")
# The signed factor of each 7-bit code of a group.
_FACTORS = torch.tensor([*FACTORS, *(-factor for factor in FACTORS)], dtype=torch.float32, device="cpu")

# By `floor(2 * value) + 256`, which is exact as all borders are multiples of 1/2: the nearest index, twice its value.
_HALVES = [(half + 0.5) / 2 for half in range(-256, 256)]
_INDICES = [min(range(16), key=lambda index, value=value: abs(CODEBOOK[index] - value)) for value in _HALVES]
_DOUBLES = [2.0 * CODEBOOK[index] for index in _INDICES]


@dataclass(frozen=True)
class Codebook4(Format):
    """Sixteen fixed values with a 6-bit scale and a sign per group of 32 weights along K."""

    name: ClassVar[str] = "codebook4"
    tensor_names: ClassVar[tuple[str, ...]] = ("qdata", "scale", "group_scale")
    bit_packed: ClassVar[Mapping[str, int]] = {"group_scale": GROUP_BITS}
    # Has no annotation, because a dataclass would make it a parameter.
    group_size = GROUP_SIZE

    def fallback(self, shape: Sequence[int]) -> Format:
        """Return this format, or int8 with one scale a row if 32 does not divide K, or N or K is at most 1."""
        *_, N, K = shape
        return self if N > 1 and K > 1 and K % GROUP_SIZE == 0 else Int8()

    def tensor_specs(self, shape: Sequence[int], scale_dtype: torch.dtype) -> Specs:
        """Return `qdata` as `[*, N, K // 8]` int32, `scale` as `[*, N, 1]`, `group_scale` as `[*, N, bytes]` uint8."""
        *lead, K = shape
        return {
            "qdata": ((*lead, K // CODES_PER_WORD), torch.int32),
            "scale": ((*lead, 1), scale_dtype),
            "group_scale": ((*lead, packed_bytes(K // GROUP_SIZE, GROUP_BITS)), torch.uint8),
        }

    def shape_of(self, qdata: Tensor) -> tuple[int, ...]:
        """Return `[*, N, K]`, eight columns for each word."""
        return (*qdata.shape[:-1], qdata.shape[-1] * CODES_PER_WORD)

    def quantize_rows(self, rows: Tensor, amax: Tensor, out: Mapping[str, Tensor]) -> None:
        """Choose the factor and sign with the smallest squared error for each group, and fill the nearest indices."""
        groups = rows.view(len(rows), -1, GROUP_SIZE)
        scale = out["scale"].copy_(_row_scale(amax, rows.dtype))
        first = encode_group_scales(_nonzero_scale(largest_magnitude(groups)), scale)
        chosen = _search(groups, first, scale)
        out["group_scale"].copy_(pack_bits(chosen, GROUP_BITS))
        doubled = reciprocal(_group_scale(chosen, scale)).unsqueeze(-1) * 2
        indices = torch.tensor(_INDICES, dtype=torch.int8, device=rows.device) - 8
        for block, values in float32_blocks(groups):
            codes = indices.index_select(0, _table_positions(values.mul_(doubled[block])).flatten())
            out["qdata"][block].copy_(pack_int4(codes.view(len(values), -1)))

    def columns(self, weight: Tensor, importance: Tensor) -> ColumnCodes:
        """Return an object that chooses codes column by column, with the row scales of `quantize_rows`."""
        return _Columns(weight, importance)

    def unpack(self, tensors: Mapping[str, Tensor]) -> Unpacked:
        """Return the indices into the codebook, 0 to 15, their values, and the signed factor of each group."""
        indices = nibbles_of(octets_of(tensors["qdata"]))
        factors = look_up(_FACTORS, codes_of_bits(tensors["group_scale"], GROUP_BITS, indices.size(-1) // GROUP_SIZE))
        return Unpacked(indices, tensors["scale"], (min(CODEBOOK), max(CODEBOOK)), table=_VALUES, factors=factors)

    def dequantize_rows(self, tensors: Mapping[str, Tensor], K: int, dtype: torch.dtype) -> Tensor:
        """Return value times factor, exact in float32, times the scale, rounded to float32, then to `dtype`."""
        qdata, wide = tensors["qdata"], torch.float64 if dtype == torch.float64 else torch.float32
        values = look_up_nibbles(qdata, torch.tensor(CODEBOOK, dtype=wide, device=qdata.device))
        groups = values.unflatten(-1, (K // GROUP_SIZE, GROUP_SIZE))
        codes = unpack_bits(tensors["group_scale"], GROUP_BITS, K // GROUP_SIZE)
        factors = _group_scale(codes, torch.ones_like(tensors["scale"])).to(wide)
        groups.mul_(factors.unsqueeze(-1)).mul_(tensors["scale"].to(wide).unsqueeze(-1))
        return values.to(dtype)


class _Columns(ColumnCodes):
    """Chooses the indices and group scales of one weight."""

    group_size = GROUP_SIZE

    def __init__(self, weight: Tensor, importance: Tensor):
        N, K = weight.shape
        self._importance = importance
        self._scale = _row_scale(largest_magnitude(weight.contiguous()).unsqueeze(-1), weight.dtype)
        self._groups = weight.new_empty((N, K // GROUP_SIZE), dtype=torch.int32)
        self._codes = weight.new_empty((K, N), dtype=torch.int8)
        self._indices = torch.tensor(_INDICES, dtype=torch.int8, device=weight.device) - 8
        self._values = torch.tensor(CODEBOOK, dtype=torch.float32, device=weight.device)

    def begin_group(self, group: int, values: Tensor) -> None:
        """Choose the factor and the sign of the smallest squared error."""
        groups, first = values.t().unsqueeze(1).contiguous(), group * GROUP_SIZE
        nearest = encode_group_scales(_nonzero_scale(largest_magnitude(groups)), self._scale)
        chosen = _search(groups, nearest, self._scale, self._importance[first : first + GROUP_SIZE])
        self._groups[:, group] = chosen.flatten()
        self._factor = _group_scale(chosen, self._scale).flatten()
        self._doubled = reciprocal(self._factor) * 2

    def encode(self, column: int, values: Tensor) -> Tensor:
        """Choose the indices of the nearest values."""
        codes = self._indices.index_select(0, _table_positions(values * self._doubled))
        self._codes[column] = codes
        return self._values.index_select(0, codes.to(torch.int32) + 8).mul_(self._factor)

    def tensors(self) -> dict[str, Tensor]:
        """Return packed indices, the scales of rows, and packed group scales."""
        qdata, groups = pack_int4(self._codes.t().contiguous()), pack_bits(self._groups, GROUP_BITS)
        return {"qdata": qdata, "scale": self._scale, "group_scale": groups}


def _row_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale of each row from its largest magnitude."""
    return round_scale(amax / _LARGEST * _HEADROOM, 128, dtype)


def _nonzero_scale(amax: Tensor) -> Tensor:
    """Return the scale that maps a group's largest magnitude to the largest value, 127; 0 for a group of zeros."""
    return (amax / _LARGEST).clamp_min(2.0**-126).masked_fill_(amax == 0, 0.0)


def _group_scale(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the float32 scales of groups from 7-bit codes: 6 bits of the factor, and above them the sign."""
    magnitude = decode_group_scales(codes & ((1 << SCALE_BITS) - 1), scale)
    return torch.where(codes >> SCALE_BITS > 0, -magnitude, magnitude)


def _search(groups: Tensor, first: Tensor, scale: Tensor, importance: Tensor | None = None) -> Tensor:
    """Return the 7-bit code of each group that has the smallest squared error; the first wins a tie.

    `first` `[n, G]` holds the codes of the factors that map the largest magnitudes to 127. `importance` `[32]` weighs
    the squared error of each column.
    """
    zero, ones = first == 0, torch.ones_like(scale)
    steps = torch.tensor(_STEPS, dtype=torch.int32, device=groups.device).view(-1, 1, 1)
    codes = (first.to(torch.int32) + steps).clamp_(1, 63).masked_fill_(zero, 0)
    doubled = reciprocal(_group_scale(codes, scale)) * 2
    # Errors are compared in units of the row's scale, so that no square overflows.
    squares = decode_group_scales(codes, ones).square_()
    table = torch.tensor(_DOUBLES, dtype=torch.float32, device=groups.device)
    best = torch.empty_like(codes[0])
    for block, values in float32_blocks(groups):
        # The groups become columns, so that a computation for all groups is one operation on whole vectors.
        columns = values.view(-1, GROUP_SIZE).t().contiguous()
        code, inverse, square = (tensor[:, block].flatten(1) for tensor in (codes, doubled, squares))
        search = search_codebook if serves(columns) else _search_by_ops
        best[block] = search(columns, code, inverse, square, table, importance).view(best[block].shape)
    return best.masked_fill_(zero, 0)


def _search_by_ops(
    groups: Tensor, codes: Tensor, doubled: Tensor, squares: Tensor, table: Tensor, importance: Tensor | None
) -> Tensor:
    """Search as `compiled_search.search_codebook` does, with ops of PyTorch."""
    least, best = torch.full_like(squares[0], torch.inf), codes[0]
    # A negative factor negates the values of the codebook, so this table has the nearest of the negated values.
    tables = {0: table, 1 << SCALE_BITS: -table.flip(0)}
    for code, inverse, square in zip(codes, doubled, squares, strict=True):
        wanted = groups * inverse
        positions = _table_positions(wanted.clone()).flatten()
        for sign, doubles in tables.items():
            squared = doubles.index_select(0, positions).view(wanted.shape).sub_(wanted).square_()
            weighed = squared if importance is None else squared.mul_(importance.unsqueeze(-1))
            error = add_by_halves(weighed).mul_(square)
            better = error < least
            least, best = torch.where(better, error, least), torch.where(better, code + sign, best)
    return best


def _table_positions(doubled: Tensor) -> Tensor:
    """Return the positions floor(doubled) + 256 in the tables, int32 from 0 to 511. Overwrites `doubled`."""
    return doubled.add_(256).clamp_(0, 511).to(torch.int32)
