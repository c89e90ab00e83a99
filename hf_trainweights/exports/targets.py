"""Targets of exports: each decides which plain tensors hold a quantized weight, and which ops compute with them.

The default target uses ATen's ops. ONNX has the op DequantizeLinear, and plain arithmetic for codes that this op cannot
read: https://onnx.ai/onnx/operators/onnx__DequantizeLinear.html. ONNX Runtime has ops of its own, MatMulNBits and
GatherBlockQuantized: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES, as_bytes
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.column_scale import COLUMN_SCALE
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.unpacked import Unpacked, nibbles_of, octets_of
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

BLOCKS_OPSET = 21
"""The first opset of ONNX that has INT4 and scales for blocks of a row."""

STORED = "hf_trainweights::Stored"
"""An op that returns its input, and that `onnx.graph` removes from the graph. It keeps exporters from computing with
codes: they compute the ops that they know on a constant of up to 8,192 elements, and write the result in its place."""

# The block sizes of MatMulNBits, the largest first, because it needs the fewest scales.
_BLOCK_SIZES = (256, 128, 64, 32, 16)


class Use(Enum):
    """How a module uses its weight: as the matrix of a Linear, as the table of an Embedding, or in another way."""

    LINEAR = auto()
    TABLE = auto()
    OTHER = auto()


@dataclass(frozen=True)
class PlainWeight:
    """A quantized weight as plain tensors.

    Args:
        format: The format of the weight, without column scales.
        dtype: The float dtype that the weight has for its module.
        shape: The stored shape `[*, N, K]`.
        buffers: The tensors that `Target.buffers` returned, or an exporter's replacements of them while it traces.
        column_scale: `[*, 1, K]`, or None.
    """

    format: Format
    dtype: torch.dtype
    shape: tuple[int, ...]
    buffers: Mapping[str, Tensor]
    column_scale: Tensor | None

    def scale_columns(self, values: Tensor) -> Tensor:
        """Multiply values `[*, K]` by the column scales."""
        if self.column_scale is None:
            return values
        factors = self.column_scale.to(values.dtype)
        return values * (factors if len(self.shape) > 2 else factors.reshape(-1))

    def unpack(self, buffers: Mapping[str, Tensor]) -> Unpacked:
        """Unpack the weight, or some of its rows, from these buffers by plain ops."""
        unpacked = self.format.unpack(buffers)
        assert unpacked is not None
        return unpacked


class Target:
    """The plain tensors and ops of one kind of file; by default the ATen ops of `Format.unpack`.

    The exported graph consists of these alone, so its reader needs no code of this package.
    """

    def buffers(self, weight: QuantizedTensor, uses: Set[Use]) -> dict[str, Tensor]:
        """Return the tensors of a weight in a file, except column scales; a tied weight may have several uses."""
        del uses
        words = {"qdata": octets_of(weight.qdata)} if weight.qdata.dtype == torch.int32 else {}
        scale = {"scale": as_bytes(weight.scale)}
        return {name: tensor for name, tensor in {**weight.tensors, **words, **scale}.items() if name != COLUMN_SCALE}

    def stored(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the file in the form that ops read."""
        return tensor

    def unpack(self, weight: PlainWeight) -> Unpacked:
        """Unpack a weight by plain ops."""
        return weight.unpack({name: self.stored(tensor) for name, tensor in weight.buffers.items()})

    def dequantize(self, weight: PlainWeight) -> Tensor:
        """Return the stored weight `[*, N, K]` in float32, without its column scales."""
        return self.unpack(weight).weight()

    def look_up(self, weight: PlainWeight, indices: Tensor) -> Tensor:
        """Look up rows `[*indices.shape, K]` of a weight `[N, K]` in float32, without its column scales."""
        shared = weight.format.shared_names
        rows = {
            name: self.stored(tensor) if name in shared else F.embedding(indices, self.stored(tensor))
            for name, tensor in weight.buffers.items()
        }
        return weight.unpack(rows).weight()

    def linear(self, weight: PlainWeight, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return `F.linear(x, weight, bias)` for x `[*, K]` and a weight `[N, K]` with its column scales."""
        return F.linear(x, weight.scale_columns(self.dequantize(weight)).to(weight.dtype), bias)


class Onnx(Target):
    """ONNX's own ops, which every runtime of ONNX knows.

    int4 words are int32 while PyTorch traces. Afterwards `onnx.graph` changes their type to INT4.
    """

    def buffers(self, weight: QuantizedTensor, uses: Set[Use]) -> dict[str, Tensor]:
        """Return the stored tensors. Codes that DequantizeLinear reads are called `codes`, others `qdata`.

        No runtime looks up rows of float8 and int4, so the codes of a table are bytes.
        """
        if weight.dtype != torch.float32:
            raise UnsupportedError(
                "model",
                "a model in float32, in which ONNX's runtimes compute on every machine",
                f"weights in {weight.dtype}",
                "Load it with dtype=torch.float32: codes and scales stay as they are.",
            )
        stored = super().buffers(weight, uses)
        if weight.scale.dtype in FLOAT_DTYPES:
            stored["scale"] = weight.scale.to(weight.dtype)
        if _code_bits(weight) is None or (Use.TABLE in uses and weight.qdata.dtype != torch.int8):
            # Rows of float8 are looked up as bytes.
            is_float8 = weight.qdata.dtype == torch.float8_e4m3fn
            return stored | ({"qdata": weight.qdata.view(torch.uint8)} if is_float8 else {})
        del stored["qdata"]
        return stored | {"codes": weight.qdata}

    def stored(self, tensor: Tensor) -> Tensor:
        """Mark a tensor, so that exporters write it to the file as it is."""
        return torch.onnx.ops.symbolic(STORED, (tensor,), dtype=tensor.dtype, shape=tensor.shape, version=1)

    def dequantize(self, weight: PlainWeight) -> Tensor:
        """Dequantize codes by DequantizeLinear, with one scale for each block of a row, or by plain arithmetic.

        A row with one scale is one block, because ONNX Runtime 1.32 rounds activations to 8 bits if scales are by axis.
        """
        if "codes" not in weight.buffers:
            return super().dequantize(weight)
        codes, scale = weight.buffers["codes"], weight.buffers["scale"]
        return torch.onnx.ops.symbolic(
            "DequantizeLinear",
            (codes, scale),
            attrs={"axis": codes.dim() - 1, "block_size": weight.shape[-1] // scale.shape[-1]},
            dtype=torch.float32,
            shape=weight.shape,
            version=BLOCKS_OPSET,
        )

    def look_up(self, weight: PlainWeight, indices: Tensor) -> Tensor:
        """Look up codes and scales of the rows, and multiply them."""
        buffers = {"qdata" if name == "codes" else name: tensor for name, tensor in weight.buffers.items()}
        return super().look_up(replace(weight, buffers=buffers), indices)

    def linear(self, weight: PlainWeight, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x by the column scales, if the weight has some, and then by the weight without them."""
        return F.linear(weight.scale_columns(x), self.dequantize(weight), bias)


class OnnxRuntime(Onnx):
    """MatMulNBits and GatherBlockQuantized for the weights that they can read, ONNX's own ops for others."""

    def buffers(self, weight: QuantizedTensor, uses: Set[Use]) -> dict[str, Tensor]:
        """Return unsigned codes, `[N, blocks, bytes]` for a Linear and `[N, bytes]` for a table, and scales by block.

        A tied weight has the codes of a Linear alone. Codes that need more than a scale are stored as `Onnx` does.
        """
        stored = super().buffers(weight, uses)
        bits, block_size = _code_bits(weight), _block_size(weight.stored_shape, weight.scale)
        is_float = weight.qdata.dtype.is_floating_point
        if bits is None or is_float or block_size is None or Use.OTHER in uses:
            return stored
        # int4 words hold unsigned codes already; int8 becomes unsigned with its sign bit flipped.
        unsigned = weight.qdata.view(torch.uint8) if bits == 4 else weight.qdata.view(torch.uint8) ^ 0x80
        if Use.LINEAR in uses:
            # This happens before the trace: exporters would write the result of an op on the codes beside the codes.
            unsigned = unsigned.unflatten(-1, (-1, block_size * bits // 8))
        repeats = weight.stored_shape[-1] // weight.scale.shape[-1] // block_size
        return stored | {"unsigned": unsigned, "blocks": stored["scale"].repeat_interleave(repeats, dim=-1)}

    def linear(self, weight: PlainWeight, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by MatMulNBits, or by ONNX's own ops if the weight does not fit it."""
        blocks = self._blocks(weight)
        if blocks is None:
            return super().linear(weight, x, bias)
        N, K = weight.shape
        bits, codes, scales, zeros = blocks
        # Input 4, the order of groups, is left out, and so is input 3 if the zero point is the middle of all codes.
        optional = (zeros, None, bias) if bias is not None else (zeros,) * (zeros is not None)
        return torch.onnx.ops.symbolic(
            "com.microsoft::MatMulNBits",
            (weight.scale_columns(x), codes, scales, *optional),
            attrs={"K": K, "N": N, "bits": bits, "block_size": K // scales.shape[-1]},
            dtype=weight.dtype,
            shape=(*x.shape[:-1], N),
            version=1,
        )

    def look_up(self, weight: PlainWeight, indices: Tensor) -> Tensor:
        """Look up rows by GatherBlockQuantized, or by ONNX's own ops if the codes are not laid out for it."""
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

    def _blocks(self, weight: PlainWeight) -> tuple[int, Tensor, Tensor, Tensor | None] | None:
        """Return the inputs of MatMulNBits for a weight `[N, K]`, stored as blocks or unpacked to blocks.

        The inputs are the bits of a code, unsigned codes as uint8 `[N, blocks, bytes]`, float32 scales `[N, blocks]`,
        and zero points as uint8 `[N, bytes]`, packed like codes; no zero points (None) stand for the middle of all
        codes. In place of all inputs None, if the weight cannot be unpacked to blocks.
        """
        if "blocks" in weight.buffers:
            return _bits(weight), weight.buffers["unsigned"], weight.buffers["blocks"], None
        if "codes" in weight.buffers:
            return None
        unpacked = self.unpack(weight)
        scales = unpacked.group_scale
        block_size = _block_size(weight.shape, scales)
        if unpacked.limits is None or unpacked.offset is not None or block_size is None:
            return None
        repeats = weight.shape[-1] // scales.shape[-1] // block_size
        numbers, zeros = unpacked.numbers(), unpacked.zeros
        # If it gets no zero points, MatMulNBits subtracts the middle of all codes: 8 for codes of 4 bits. So the
        # numbers fit 4 bits if they are 0 to 15 after adding 8.
        low, high = unpacked.limits if zeros is not None else (limit + 8 for limit in unpacked.limits)
        bits = 4 if low >= 0 and high < 16 else 8
        if zeros is None:
            numbers = numbers + (1 << bits - 1)
        else:
            zeros = _packed(_repeated(zeros.to(torch.float32), repeats), bits)
        return bits, _packed(numbers.unflatten(-1, [-1, block_size]), bits), _repeated(scales, repeats), zeros


def _code_bits(weight: QuantizedTensor) -> int | None:
    """Return the bits of codes that need only a scale and whose type ONNX has; None for other codes."""
    if weight.format.name == Int4.name:
        return 4
    stored = {name: tensor.to("meta") for name, tensor in weight.tensors.items()}
    unpacked = weight.format.unpack(stored)
    if unpacked is None or not unpacked.is_codes_times_scale or unpacked.scale is not stored["scale"]:
        return None
    return 8 if weight.qdata.dtype in (torch.int8, torch.float8_e4m3fn) else None


def _bits(weight: PlainWeight) -> int:
    """Return the bits of a code among the unsigned codes of `OnnxRuntime.buffers`."""
    return weight.buffers["unsigned"].numel() // weight.shape[0] * 8 // weight.shape[1]


def _block_size(shape: Sequence[int], scale: Tensor) -> int | None:
    if len(shape) != 2:
        return None
    group_size = shape[-1] // scale.shape[-1]
    return next((size for size in _BLOCK_SIZES if group_size % size == 0), None)


def _repeated(values: Tensor, repeats: int) -> Tensor:
    """Repeat the values of groups `[N, G]` for each of the `repeats` blocks of a group."""
    return values if repeats == 1 else values.unsqueeze(-1).expand(-1, -1, repeats).flatten(-2)


def _packed(numbers: Tensor, bits: int) -> Tensor:
    """Convert integers in float32 `[*, n]` to uint8. Two of 4 bits share a byte, the first in the low bits."""
    if bits == 8:
        return numbers.to(torch.uint8)
    pairs = F.pad(numbers, (0, numbers.size(-1) % 2)).unflatten(-1, [-1, 2])
    return (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8)
