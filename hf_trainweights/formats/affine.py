"""affine: codes of 2 to 8 bits with a scale and perhaps an offset for each group, as many programs store weights.

| tensor | shape | dtype |
|---|---|---|
| `qdata` | 4 bits: `[*, N, K // 8]`; 2, 3, 5, 6 bits: `[*, N, K // 32 * bits]`; 8 bits: `[*, N, K]` | int32, uint8 |
| `scale`, `group_scale` | as the coding `scales` stores them (`scale_codings`) | |
| `zero_point` | `[*, N, bytes]`, codes packed as in `group_scales`; of 8 bits or one a row: `[*, N, G]` | uint8 |
| `zero_point` that is no integer | `[*, N, G]` | the dtype of `scale` |
| `bias` | `[*, N, G]` | the dtype of `scale` |

4 bits are packed as in `packing`, 2, 3, 5 and 6 bits as in `planes`. Codes count from 0.

    weight = (code - zero) * scale + offset

Each operation is rounded to float32, and the result to the dtype. If `rounding` is "each", each operation is rounded to
the dtype, as some programs do: so a weight of their files gets the values that they compute.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_trainweights.errors import ConfigError
from hf_trainweights.formats.arithmetic import float32_blocks, reciprocal, round_scale
from hf_trainweights.formats.base import Format, Specs
from hf_trainweights.formats.columns import ColumnCodes
from hf_trainweights.formats.group_scales import codes_of_bits, pack_bits, packed_bytes
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.packing import CODES_PER_WORD, pack_int4, unpack_int4
from hf_trainweights.formats.planes import COLUMNS, codes_of_planes, pack_planes, unpack_planes
from hf_trainweights.formats.scale_codings import SCALE_CODINGS, ScaleCoding, check_group_size
from hf_trainweights.formats.unpacked import Unpacked, nibbles_of, octets_of

BITS = (2, 3, 4, 5, 6, 8)
CODINGS = ("plain", "k4", "k2", "k3", "k6")
# To each offset, its stored tensor.
OFFSETS = {
    "none": None,
    "zero_point": "zero_point",
    "zero_point_minus_1": "zero_point",
    "float_zero_point": "zero_point",
    "bias": "bias",
}
ROUNDINGS = ("once", "each")

# The parts of a group's range that the search tries, the whole range first, which wins a tie. The fewer codes there
# are, the more of the range the least squared error clips. On normally distributed groups of 128, these gain 2.7 dB at
# 2 bits, 1.2 dB at 3 and .5 dB at 4 over the whole range.
_CLIPPINGS = {
    2: (1.0, 0.9, 0.8, 0.7, 0.6, 0.5),
    3: (1.0, 0.93, 0.86, 0.79, 0.72, 0.65),
    4: (1.0, 0.95, 0.9, 0.85, 0.8),
}


@dataclass(frozen=True)
class Affine(Format):
    """Codes from 0 on with a scale, and perhaps a zero point or bias, per group of `group_size` weights along K.

    Args:
        bits: Bits of a code: 2, 3, 4, 5, 6 or 8.
        group_size: Weights that share a scale: a multiple of 8, or None for one scale a row.
        scales: "plain" for one float scale a group. "k2", "k3", "k4" and "k6" are the scales of GGUF's K-quants, in
            groups of 16 or, for k4, 32.
        offset: "zero_point" for integers of `bits` bits, "zero_point_minus_1" for integers that are one less than the
            zero point, "float_zero_point" for zero points that are no integers, "bias" for floats that are added after
            the scaling, or "none": codes are above half their range, or have the minima of the coding k2 or k4.
        rounding: "each" to round each operation to the dtype of the weight, "once" to round the result alone.

    Raises:
        ConfigError: A parameter is none of these, or two exclude each other.
    """

    name: ClassVar[str] = "affine"
    tensor_names: ClassVar[tuple[str, ...]] = ("qdata", "scale", "group_scale", "zero_point", "bias")
    bits: int = 4
    group_size: int | None = 128
    scales: str = "plain"
    offset: str = "zero_point"
    rounding: str = "once"

    def __post_init__(self) -> None:
        self.check_choice("bits", BITS)
        self.check_choice("scales", CODINGS)
        self.check_choice("offset", tuple(OFFSETS))
        self.check_choice("rounding", ROUNDINGS)
        check_group_size(self, self.scales, or_none=True)
        if self.scales != "plain" and self.offset != "none":
            expected = f'"none" for scales {self.scales!r}'
            raise ConfigError("offset", expected, repr(self.offset), "These scales have offsets of their own, or none.")
        # On the class, `tensor_names` are all names that a weight may have.
        names = ("qdata", *self.coding.columns(1, torch.float32), OFFSETS[self.offset])
        object.__setattr__(self, "tensor_names", tuple(name for name in names if name))

    def __str__(self) -> str:
        scales = "" if self.scales == "plain" else f" {self.scales}"
        group_size = "" if self.group_size is None or scales else f" g{self.group_size}"
        offset = "" if self.offset == "zero_point" or scales else f" {self.offset}"
        return f"{self.name}{self.bits}{scales}{group_size}{offset}{' rounded each' * (self.rounding == 'each')}"

    @property
    def coding(self) -> ScaleCoding:
        """How the scales are stored."""
        return SCALE_CODINGS[self.scales]

    @property
    def is_import_only(self) -> bool:  # type: ignore[override]  (an attribute of the class in Format)
        """Whether weights come from files alone: all but plain scales with integer zero points."""
        return (self.scales, self.offset) != ("plain", "zero_point")

    def for_new_values(self) -> Format:
        """Return the format with plain scales and integer zero points."""
        return Affine(self.bits, self.group_size)

    @property
    def bit_packed(self) -> Mapping[str, int]:  # type: ignore[override]  (likewise)
        """Integer zero points of less than a byte, if a row has more than one."""
        is_packed = self.offset.startswith("zero_point") and self.bits < 8 and self.group_size is not None
        return {"zero_point": self.bits} if is_packed else {}

    @property
    def column_step(self) -> int:
        """The columns of a word or plane, of whole groups, and of a superblock."""
        group_columns = (self.group_size or 1) * self.coding.superblock_groups
        return math.lcm(group_columns, _packed_columns(self.bits))

    def fallback(self, shape: Sequence[int]) -> Format:
        """Return this format, or int8 with one scale a row if groups do not divide K, or N or K is at most 1."""
        *_, N, K = shape
        fits = N > 1 and K > 1 and K % _packed_columns(self.bits) == 0
        return self if fits and K % ((self.group_size or K) * self.coding.superblock_groups) == 0 else Int8()

    def tensor_specs(self, shape: Sequence[int], scale_dtype: torch.dtype) -> Specs:
        """Return codes, the tensors of the scales, and `zero_point` or `bias`."""
        *lead, K = shape
        G = K // (self.group_size or K) if K else 0
        sizes = {"qdata": (_packed_size(K, self.bits), torch.uint8 if self.bits == 8 else torch.int32)}
        sizes |= self.coding.columns(G, scale_dtype)
        if self.offset in ("bias", "float_zero_point"):
            sizes[OFFSETS[self.offset] or ""] = (G, scale_dtype)
        elif self.offset != "none":
            sizes["zero_point"] = (packed_bytes(G, self.bits) if self.bit_packed else G, torch.uint8)
        return {name: ((*lead, size), dtype) for name, (size, dtype) in sizes.items()}

    def shape_of(self, qdata: Tensor) -> tuple[int, ...]:
        """Return `[*, N, K]`."""
        columns = _packed_columns(self.bits)
        return (*qdata.shape[:-1], qdata.shape[-1] * columns // max(1, _packed_size(columns, self.bits)))

    def quantize_rows(self, rows: Tensor, amax: Tensor, out: Mapping[str, Tensor]) -> None:
        """Choose the clipping of each group's range with the smallest squared error, and fill the nearest codes."""
        groups = rows.view(*amax.shape, -1)
        for block, values in float32_blocks(groups):
            scale, zeros = _search(values, self.bits, rows.dtype)
            codes = _encode(values, scale, zeros, self.bits).to(torch.uint8)
            out["scale"][block].copy_(scale)
            out["zero_point"][block].copy_(pack_zeros(zeros, self))
            out["qdata"][block].copy_(pack_codes(codes.flatten(1), self.bits))

    def columns(self, weight: Tensor, importance: Tensor) -> ColumnCodes | None:
        """Return an object that chooses codes column by column, with the clippings of `quantize_rows`."""
        return None if self.is_import_only else _Columns(self, weight, importance)

    def unpack(self, tensors: Mapping[str, Tensor]) -> Unpacked:
        """Return codes, zero points, scales and offsets of groups."""
        codes = _codes_of(octets_of(tensors["qdata"]), self.bits)
        scale, zeros, offset = self._parameters(tensors, codes.size(-1))
        if self.scales == "plain":
            scale = tensors["scale"]  # in its own dtype, in which an exported graph holds it
        if isinstance(zeros, int):
            codes, zeros = (codes - zeros if zeros else codes), None
        lowest = -self._fixed_zero()
        # The limits hold for zeros, too, and those of `zero_point_minus_1` go up to 2**bits.
        largest = lowest + 2**self.bits - (0 if self.offset == "zero_point_minus_1" else 1)
        limits = None if self.offset == "float_zero_point" or largest > 255 else (lowest, largest)
        return Unpacked(codes, scale, limits, zeros=zeros, offset=offset)

    def dequantize_rows(self, tensors: Mapping[str, Tensor], K: int, dtype: torch.dtype) -> Tensor:
        """Return `(code - zero) * scale + offset`, with the roundings of the format."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        codes = _unpack(tensors["qdata"], self.bits)
        scale, zeros, offset = self._parameters(tensors, K)
        values = codes.to(wide).unflatten(-1, (scale.shape[-1], -1))
        if isinstance(zeros, Tensor):
            values = self._round(values.sub_(zeros.to(wide).unsqueeze(-1)), dtype)
        elif zeros:
            values.sub_(zeros)
        values.mul_(scale.to(wide).unsqueeze(-1))
        if offset is not None:
            values = self._round(values, dtype).add_(offset.to(wide).unsqueeze(-1))
        return values.to(dtype).flatten(-2)

    def _round(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Return an intermediate result as the next operation gets it."""
        return values.to(dtype).to(values.dtype) if self.rounding == "each" else values

    def _fixed_zero(self) -> int:
        """Return the zero of all codes if no tensor holds zeros."""
        return 2 ** (self.bits - 1) if self.offset == "none" and not self.coding.has_minima else 0

    def _parameters(self, tensors: Mapping[str, Tensor], K: int) -> tuple[Tensor, Tensor | int, Tensor | None]:
        """Return the float32 scales of groups, their zeros or the zero of all, and their offsets or None."""
        G = K // (self.group_size or K)
        scale, minimum = self.coding.decode(tensors, G)
        if self.offset == "bias":
            return scale, 0, tensors["bias"].to(torch.float32)
        if self.offset == "none":
            return scale, self._fixed_zero(), None if minimum is None else -minimum
        zeros = tensors["zero_point"]
        if self.bit_packed:
            zeros = codes_of_bits(zeros, self.bits, G)
        zeros = zeros.to(torch.float32)
        return scale, zeros + 1 if self.offset == "zero_point_minus_1" else zeros, None


def _packed_columns(bits: int) -> int:
    """Return the number of columns whose codes share words."""
    return {8: 1, 4: CODES_PER_WORD}.get(bits, COLUMNS)


def _packed_size(K: int, bits: int) -> int:
    """Return how many elements of `qdata` hold K codes: bytes for codes of 8 bits, int32 words for others."""
    return K if bits == 8 else K * bits // 32


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes `[*, K]` as this format stores them."""
    if bits == 8:
        return codes
    return pack_int4(codes.view(torch.int8) - 8) if bits == 4 else pack_planes(codes, bits)


def _unpack(qdata: Tensor, bits: int) -> Tensor:
    """Return the codes `[*, K]`, an integer dtype."""
    if bits == 8:
        return qdata
    return unpack_int4(qdata).add_(8) if bits == 4 else unpack_planes(qdata, bits)


def _codes_of(octets: Tensor, bits: int) -> Tensor:
    """Unpack as `_unpack` does, from bytes to float32, by ops that every exporter of PyTorch can write."""
    if bits == 8:
        return octets.to(torch.float32)
    return nibbles_of(octets) if bits == 4 else codes_of_planes(octets, bits)


class _Columns(ColumnCodes):
    """Chooses the codes, scales and zero points of one weight; scales and zero points are `[N, G]`."""

    def __init__(self, form: Affine, weight: Tensor, importance: Tensor):
        N, K = weight.shape
        self.group_size, self._form, self._importance = form.group_size, form, importance
        self._scale = weight.new_empty((N, K // (form.group_size or K)))
        self._zeros = torch.empty_like(self._scale, dtype=torch.float32)
        self._codes = weight.new_empty((K, N), dtype=torch.uint8)
        if form.group_size is None:
            self.begin_group(0, weight.float().t())

    def begin_group(self, group: int, values: Tensor) -> None:
        """Choose the clipping with the smallest squared error for a group's columns, `values` `[group_size, N]`."""
        groups, first = values.t().unsqueeze(1).contiguous(), group * len(values)
        importance = self._importance[first : first + len(values)]
        scale, zeros = _search(groups, self._form.bits, self._scale.dtype, importance)
        self._scale[:, group], self._zeros[:, group] = scale[:, 0], zeros[:, 0]
        self._current = scale, zeros, scale.float().flatten()

    def encode(self, column: int, values: Tensor) -> Tensor:
        """Choose the nearest codes of a column, and return their dequantized values."""
        scale, zeros, factor = self._current
        codes = _encode(values.view(-1, 1, 1), scale, zeros, self._form.bits).flatten()
        self._codes[column] = codes
        return codes.sub_(zeros.flatten()).mul_(factor)

    def tensors(self) -> dict[str, Tensor]:
        """Return packed codes, scales, and packed zero points."""
        codes = self._codes.t().contiguous()
        zeros = pack_zeros(self._zeros, self._form)
        return {"qdata": pack_codes(codes, self._form.bits), "scale": self._scale, "zero_point": zeros}


def pack_zeros(zeros: Tensor, form: Affine) -> Tensor:
    """Pack integer zero points `[n, G]` of any dtype as a format stores them."""
    return pack_bits(zeros, form.bits) if form.bit_packed else zeros.to(torch.uint8)


def _search(groups: Tensor, bits: int, dtype: torch.dtype, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return scales of `dtype` and zero points, both `[n, G]`, with the smallest squared error for `[n, G, g]`.

    `importance` `[g]` weighs the squared error of each column.
    """
    largest = 2**bits - 1
    low, high = groups.amin(dim=-1).clamp_max_(0), groups.amax(dim=-1).clamp_min_(0)
    # The difference of the ends could overflow.
    covering = high / largest - low / largest
    chosen: tuple[Tensor, Tensor, Tensor] | None = None
    for clipping in _CLIPPINGS.get(bits, (1.0,)):
        # A code that would overflow with this scale is clamped.
        scale = round_scale(covering * clipping, largest_code=1, dtype=dtype)
        zeros = (low * clipping * -reciprocal(scale)).round_().clamp_(0, largest)
        values = _encode(groups, scale, zeros, bits).sub_(zeros.unsqueeze(-1))
        squares = values.mul_(scale.float().unsqueeze(-1)).sub_(groups).square_()
        error = (squares if importance is None else squares.mul_(importance)).sum(dim=-1)
        if chosen is None:
            chosen = scale, zeros, error
        else:
            better = error < chosen[2]
            scale, zeros = torch.where(better, scale, chosen[0]), torch.where(better, zeros, chosen[1])
            chosen = scale, zeros, torch.where(better, error, chosen[2])
    assert chosen is not None
    return chosen[:2]


def _encode(groups: Tensor, scale: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Return the nearest codes of groups `[n, G, g]` whose values are finite in the scale's dtype, as floats."""
    inverse, zeros, largest = reciprocal(scale), zeros.unsqueeze(-1), 2**bits - 1
    codes = (groups * inverse.unsqueeze(-1)).round_().add_(zeros)
    most = torch.finfo(scale.dtype).max
    if bool(scale.float().amax() < most / largest):
        return codes.clamp_(0, largest)
    # Codes beyond `reach` from the zero point would be dequantized to infinity. The factor below 1 makes up for the
    # rounding of the quotient.
    reach = (most * (1 - 2**-20) * inverse).floor_().unsqueeze(-1)
    return codes.clamp_((zeros - reach).clamp_min_(0), (zeros + reach).clamp_max_(largest))
