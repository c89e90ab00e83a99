"""ATen ops: what TorchScript, torch.export and AOTInductor hold, and what libtorch runs."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_trainweights.exports.targets.base import PlainWeight, Target, Use
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.codebook4 import CODEBOOK, GROUP_BITS, GROUP_SIZE, Codebook4
from hf_trainweights.formats.column_scale import COLUMN_SCALE, ColumnScaled
from hf_trainweights.formats.group_scales import FACTORS
from hf_trainweights.formats.uint import UInt
from hf_trainweights.formats.uint_search import Grid
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# What indices and codes of group scales stand for in codebook4; a constant made while a model is traced is warned of.
_TABLES = {
    "codebook": torch.tensor(CODEBOOK, dtype=torch.float32, device="cpu"),
    "factors": torch.tensor([*FACTORS, *(-factor for factor in FACTORS)], dtype=torch.float32, device="cpu"),
}


def codes_of(qdata: Tensor) -> Tensor:
    """Return stored codes as float32, in any language that PyTorch compiles to.

    Args:
        qdata: Int8 or float8 `[*, K]`, or int32 words `[*, K / 8]` of eight 4-bit codes, each + 8.

    Returns:
        New float32 `[*, K]`.
    """
    if qdata.dtype == torch.int32:
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=qdata.device)
        nibbles = (qdata.unsqueeze(-1) >> shifts) & 15
        qdata = torch.flatten(nibbles - 8, -2)
    return qdata.to(torch.float32)


def scaled(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the product of codes and scales, in float32.

    Args:
        codes: Float32 `[*, K]`.
        scale: `[*, G]`.
    """
    groups = codes.unflatten(-1, [scale.size(-1), codes.size(-1) // scale.size(-1)])
    return torch.flatten(groups * scale.to(torch.float32).unsqueeze(-1), -2)


def plane_codes_of(qdata: Tensor, bits: int) -> Tensor:
    """Return the codes of `formats.planes` as int32, in any language that PyTorch compiles to.

    Args:
        qdata: Int32 words `[*, K / 32 * bits]`.
        bits: Bits of a code.

    Returns:
        New int32 `[*, K]`.
    """
    octets = _fields(qdata, torch.arange(0, 32, 8, dtype=torch.int32, device=qdata.device), 255)
    octets = octets.unflatten(-1, [-1, 4 * bits])
    codes, start = torch.zeros_like(octets.narrow(-1, 0, 1)), 0
    for plane in (4, 2, 1):
        if bits & plane:
            part = octets.narrow(-1, 4 * start, 4 * plane)
            fields = [(part >> shift) & (2**plane - 1) for shift in range(0, 8, plane)]
            codes = codes + (torch.cat(fields, dim=-1) << start)
            start += plane
    return torch.flatten(codes, -2)


def _fields(words: Tensor, shifts: Tensor, mask: int) -> Tensor:
    """Return what lies at each shift of each word, one after the other along the last dimension."""
    return torch.flatten((words.unsqueeze(-1) >> shifts) & mask, -2)


def _uint_weight(grid: Grid, stored: Mapping[str, Tensor]) -> Tensor:
    """Return the float32 weight that stored tensors of `uint` stand for."""
    shifts = torch.arange(0, 8, 4, dtype=torch.int32, device=stored["qdata"].device)
    zeros, scales = (_fields(stored[name].to(torch.int32), shifts, 15) for name in ("zero_point", "group_scale"))
    codes = plane_codes_of(stored["qdata"], grid.bits)
    groups = codes.unflatten(-1, [zeros.size(-1), codes.size(-1) // zeros.size(-1)])
    steps = (scales + 1).to(torch.float32) * stored["scale"].to(torch.float32)
    differences = groups * grid.code_units - (zeros * grid.zero_units).unsqueeze(-1)
    return torch.flatten(differences.to(torch.float32) * steps.unsqueeze(-1), -2)


def _codebook_weight(stored: Mapping[str, Tensor]) -> Tensor:
    """Return the float32 weight that stored tensors of `codebook4` stand for."""
    qdata, packed = stored["qdata"], stored["group_scale"].to(torch.int32)
    indices = _fields(qdata, torch.arange(0, 32, 4, dtype=torch.int32, device=qdata.device), 15)
    groups = stored["codebook"][indices.to(torch.int64)]
    groups = groups.unflatten(-1, [indices.size(-1) // GROUP_SIZE, GROUP_SIZE])
    # A code of 7 bits lies in one byte or across two.
    bits = torch.arange(0, groups.size(-2) * GROUP_BITS, GROUP_BITS, device=qdata.device)
    low = packed.index_select(-1, bits >> 3)
    high = F.pad(packed, (0, 1)).index_select(-1, (bits >> 3) + 1)
    codes = ((low | (high << 8)) >> (bits & 7).to(torch.int32)) & (2**GROUP_BITS - 1)
    scale = stored["scale"].to(torch.float32).unsqueeze(-1)
    return torch.flatten(groups * stored["factors"][codes.to(torch.int64)].unsqueeze(-1) * scale, -2)


def float32_weight(form: Format, stored: Mapping[str, Tensor]) -> Tensor:
    """Return the float32 weight that stored tensors stand for, by plain ops.

    Args:
        form: Its format.
        stored: Its tensors by name.
    """
    if isinstance(form, ColumnScaled):
        return float32_weight(form.inner, stored) * stored[COLUMN_SCALE].to(torch.float32)
    if isinstance(form, Codebook4):
        return _codebook_weight(stored)
    if isinstance(form, UInt):
        return _uint_weight(form.grid, stored)
    return scaled(codes_of(stored["qdata"]), stored["scale"])


class Aten(Target):
    """The codes as they lie, and plain arithmetic on them."""

    name = "ATen"
    format_names = (*Target.format_names, "uint2", "uint3", "uint4", "uint5", "uint6", "codebook4")
    holds_column_scales = True

    def buffers(self, weight: QuantizedTensor, uses: Set[Use]) -> dict[str, Tensor]:
        """Return the stored tensors; beside those of codebook4 what its codes stand for, the same for all weights."""
        del uses
        tables = {name: table.to(weight.device) for name, table in _TABLES.items()}
        return {**weight.tensors, **(tables if weight.format.name == Codebook4.name else {})}

    def dequantize(self, weight: PlainWeight) -> Tensor:
        """Return the product of codes and scales, rounded once."""
        return float32_weight(weight.format, weight.buffers).to(weight.dtype)

    def look_up(self, weight: PlainWeight, indices: Tensor) -> Tensor:
        """Dequantize the rows that are looked up."""
        rows = {
            name: stored if name in (*weight.format.shared_names, *_TABLES) else F.embedding(indices, stored)
            for name, stored in weight.buffers.items()
        }
        return float32_weight(weight.format, rows).to(weight.dtype)
