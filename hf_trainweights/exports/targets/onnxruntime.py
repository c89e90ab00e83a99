"""ONNX Runtime's own ops, which multiply with the codes.

https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md: MatMulNBits, GatherBlockQuantized.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_trainweights.exports.targets.base import PlainWeight, Use
from hf_trainweights.exports.targets.onnx import Onnx, code_bits
from hf_trainweights.formats.unpacked import Unpacked, nibbles_of
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# The lengths of blocks that MatMulNBits knows, the longest first: it has the fewest scales.
_BLOCK_SIZES = (256, 128, 64, 32, 16)


class _Blocks(NamedTuple):
    """A weight `[N, K]` in blocks of a row: codes of 4 or 8 bits, from 0 on, and for each block a scale.

    Args:
        bits: Of a code.
        codes: Uint8 `[N, blocks, bytes]`.
        scales: Float32 `[N, blocks]`.
        zeros: Uint8 `[N, bytes]`, packed as codes are; None for the middle of all codes.
    """

    bits: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None


class OnnxRuntime(Onnx):
    """MatMulNBits and GatherBlockQuantized where a weight fits them, ONNX's own ops elsewhere."""

    def buffers(self, weight: QuantizedTensor, uses: Set[Use]) -> dict[str, Tensor]:
        """Return unsigned codes, `[N, blocks, bytes]` for a Linear and `[N, bytes]` for a table, and scales by block.

        A tied weight has them as for a Linear, once. Codes that need more than a scale are as in a file of ONNX.
        """
        stored = super().buffers(weight, uses)
        bits, block_size = code_bits(weight), _block_size(weight.stored_shape, weight.scale)
        is_float = weight.qdata.dtype.is_floating_point
        if bits is None or is_float or block_size is None or Use.OTHER in uses:
            return stored
        # int4 words hold unsigned codes already; int8 becomes unsigned with its sign bit flipped.
        unsigned = weight.qdata.view(torch.uint8) if bits == 4 else weight.qdata.view(torch.uint8) ^ 0x80
        if Use.LINEAR in uses:
            # Exporters would write the result of an op on it beside it.
            unsigned = unsigned.unflatten(-1, (-1, block_size * bits // 8))
        repeats = weight.stored_shape[-1] // weight.scale.shape[-1] // block_size
        return stored | {"unsigned": unsigned, "blocks": stored["scale"].repeat_interleave(repeats, dim=-1)}

    def linear(self, weight: PlainWeight, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by MatMulNBits."""
        blocks = self._blocks(weight)
        if blocks is None:
            return super().linear(weight, x, bias)
        N, K = weight.shape
        # Its input 4, the order of groups, is left out, and input 3 where zeros are as it expects them.
        optional = (blocks.zeros, None, bias) if bias is not None else (blocks.zeros,) * (blocks.zeros is not None)
        return torch.onnx.ops.symbolic(
            "com.microsoft::MatMulNBits",
            (weight.scale_columns(x), blocks.codes, blocks.scales, *optional),
            attrs={"K": K, "N": N, "bits": blocks.bits, "block_size": K // blocks.scales.shape[-1]},
            dtype=weight.dtype,
            shape=(*x.shape[:-1], N),
            version=1,
        )

    def look_up(self, weight: PlainWeight, indices: Tensor) -> Tensor:
        """Look rows up by GatherBlockQuantized; by ONNX's own ops where codes do not lie as it reads them."""
        if "blocks" not in weight.buffers:
            return super().look_up(weight, indices)
        unsigned, scales = weight.buffers["unsigned"], weight.buffers["blocks"]
        bits, K = _bits(weight), weight.shape[-1]
        if unsigned.dim() == 3:
            rows = unsigned.index_select(0, indices.flatten()).view(*indices.shape, -1)
            codes = (nibbles_of(rows) if bits == 4 else rows).to(torch.float32) - (1 << bits - 1)
            return Unpacked(codes, F.embedding(indices, scales), None).weight()
        return torch.onnx.ops.symbolic(
            "com.microsoft::GatherBlockQuantized",
            (unsigned, indices, scales),
            attrs={"gather_axis": 0, "quantize_axis": 1, "block_size": K // scales.shape[-1], "bits": bits},
            dtype=torch.float32,
            shape=(*indices.shape, K),
            version=1,
        )

    def _blocks(self, weight: PlainWeight) -> _Blocks | None:
        """Return a weight in blocks: those of the file, or what its tensors are unpacked to; None if it has none."""
        if "blocks" in weight.buffers:
            return _Blocks(_bits(weight), weight.buffers["unsigned"], weight.buffers["blocks"], None)
        if "codes" in weight.buffers:
            return None
        unpacked = self.unpack(weight)
        scales = unpacked.group_scale
        block_size = _block_size(weight.shape, scales)
        if unpacked.limits is None or block_size is None:
            return None
        repeats = weight.shape[-1] // scales.shape[-1] // block_size
        numbers, zeros = unpacked.numbers(), unpacked.zeros
        # MatMulNBits takes the middle of all codes for zero unless it is told otherwise.
        low, high = unpacked.limits if zeros is not None else (limit + 8 for limit in unpacked.limits)
        bits = 4 if low >= 0 and high < 16 else 8
        if zeros is None:
            numbers = numbers + (1 << bits - 1)
        else:
            zeros = _packed(_repeated(zeros.to(torch.float32), repeats), bits)
        return _Blocks(bits, _packed(numbers.unflatten(-1, [-1, block_size]), bits), _repeated(scales, repeats), zeros)


def _bits(weight: PlainWeight) -> int:
    """Return the bits of codes that `OnnxRuntime.buffers` has laid out in blocks."""
    return weight.buffers["unsigned"].numel() // weight.shape[0] * 8 // weight.shape[1]


def _block_size(shape: Sequence[int], scale: Tensor) -> int | None:
    if len(shape) != 2:
        return None
    group_size = shape[-1] // scale.shape[-1]
    return next((size for size in _BLOCK_SIZES if group_size % size == 0), None)


def _repeated(values: Tensor, repeats: int) -> Tensor:
    """Return the values of groups `[N, G]` for each of so many blocks of a group."""
    return values if repeats == 1 else values.unsqueeze(-1).expand(-1, -1, repeats).flatten(-2)


def _packed(numbers: Tensor, bits: int) -> Tensor:
    """Return whole float32 numbers `[*, n]` as uint8: two to a byte, the first in the low bits, if they have 4 bits."""
    if bits == 8:
        return numbers.to(torch.uint8)
    pairs = F.pad(numbers, (0, numbers.size(-1) % 2)).unflatten(-1, [-1, 2])
    return (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8)
