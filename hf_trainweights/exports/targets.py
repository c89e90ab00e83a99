"""What a target of an export decides: which plain tensors hold a quantized weight, and which ops compute with them.

By default these are ATen's. ONNX has DequantizeLinear for codes as they lie, and plain arithmetic for those that it
cannot read: https://onnx.ai/onnx/operators/onnx__DequantizeLinear.html. ONNX Runtime has ops of its own, MatMulNBits
and GatherBlockQuantized: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.column_scale import COLUMN_SCALE
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.unpacked import Unpacked, nibbles_of, octets_of
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

BLOCKS_OPSET = 21
"""The first version of ONNX that has INT4 and scales for blocks of a row."""

STORED = "hf_trainweights::Stored"
"""An op that returns its input, until `onnx.graph` takes it out of the graph. Exporters would compute what
follows from a constant of up to 8,192 elements and write the result instead, but know nothing of this op."""

# The lengths of blocks that MatMulNBits knows, the longest first: it has the fewest scales.
_BLOCK_SIZES = (256, 128, 64, 32, 16)


class Use(Enum):
    """What the module that owns a weight does with it."""

    LINEAR = auto()
    TABLE = auto()
    OTHER = auto()


@dataclass(frozen=True)
class PlainWeight:
    """A quantized weight as plain tensors.

    Args:
        format: Its format, without column scales.
        dtype: The float dtype that it shows.
        shape: As it is stored, `[*, N, K]`.
        buffers: What `Target.buffers` returned, or what stands for it while an exporter traces.
        column_scale: `[*, 1, K]`, None for none.
    """

    format: Format
    dtype: torch.dtype
    shape: tuple[int, ...]
    buffers: Mapping[str, Tensor]
    column_scale: Tensor | None

    def scale_columns(self, values: Tensor) -> Tensor:
        """Return values `[*, K]` times the column scales."""
        if self.column_scale is None:
            return values
        factors = self.column_scale.to(values.dtype)
        return values * (factors if len(self.shape) > 2 else factors.reshape(-1))

    def unpack(self, buffers: Mapping[str, Tensor]) -> Unpacked:
        """Return the weight taken apart by plain ops, from its buffers or those of some rows."""
        unpacked = self.format.unpack(buffers)
        assert unpacked is not None
        return unpacked


class Target:
    """The plain tensors and ops of one kind of file; by default ATen's, which a format gives (`Format.unpack`).

    Nothing but these is in the exported graph, so its reader needs no code of this package.
    """

    def buffers(self, weight: QuantizedTensor, uses: Set[Use]) -> dict[str, Tensor]:
        """Return the tensors that stand for a weight in a file, besides column scales; a tied one has several uses."""
        del uses
        words = {"qdata": octets_of(weight.qdata)} if weight.qdata.dtype == torch.int32 else {}
        return {name: tensor for name, tensor in {**weight.tensors, **words}.items() if name != COLUMN_SCALE}

    def stored(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the file as ops read it."""
        return tensor

    def unpack(self, weight: PlainWeight) -> Unpacked:
        """Return a weight taken apart by plain ops."""
        return weight.unpack({name: self.stored(tensor) for name, tensor in weight.buffers.items()})

    def dequantize(self, weight: PlainWeight) -> Tensor:
        """Return the stored weight `[*, N, K]` in float32, without its column scales."""
        return self.unpack(weight).weight()

    def look_up(self, weight: PlainWeight, indices: Tensor) -> Tensor:
        """Return rows `[*indices.shape, K]` of a weight `[N, K]` in float32, without its column scales."""
        shared = weight.format.shared_names
        rows = {
            name: self.stored(tensor) if name in shared else F.embedding(indices, self.stored(tensor))
            for name, tensor in weight.buffers.items()
        }
        return weight.unpack(rows).weight()

    def linear(self, weight: PlainWeight, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return `F.linear(x, weight, bias)` of x `[*, K]` and a weight `[N, K]`, with its column scales."""
        return F.linear(x, weight.scale_columns(self.dequantize(weight)).to(weight.dtype), bias)


class Onnx(Target):
    """ONNX's own ops, which every runtime of ONNX knows.

    int4 words are in the graph as int32 while PyTorch traces; `onnx.graph` gives them their type.
    """

    def buffers(self, weight: QuantizedTensor, uses: Set[Use]) -> dict[str, Tensor]:
        """Return the stored tensors: as `codes` those that DequantizeLinear reads, as `qdata` what else they are.

        No runtime looks up rows of float8 and int4, so that the codes of a table are bytes.
        """
        if weight.dtype != torch.float32:
            raise UnsupportedError(
                "model",
                "a model in float32, in which ONNX's runtimes compute on every machine",
                f"weights in {weight.dtype}",
                "Load it with dtype=torch.float32: codes and scales stay as they are.",
            )
        stored = super().buffers(weight, uses)
        stored["scale"] = weight.scale.to(weight.dtype)
        if _code_bits(weight) is None or (Use.TABLE in uses and weight.qdata.dtype != torch.int8):
            # float8 is looked up by its bytes.
            is_float8 = weight.qdata.dtype == torch.float8_e4m3fn
            return stored | ({"qdata": weight.qdata.view(torch.uint8)} if is_float8 else {})
        del stored["qdata"]
        return stored | {"codes": weight.qdata}

    def stored(self, tensor: Tensor) -> Tensor:
        """Return a tensor that stays in the file as it is."""
        return torch.onnx.ops.symbolic(STORED, (tensor,), dtype=tensor.dtype, shape=tensor.shape, version=1)

    def dequantize(self, weight: PlainWeight) -> Tensor:
        """Return DequantizeLinear of the codes, with one scale for each block of a row, or plain arithmetic.

        A row with one scale is one block: ONNX Runtime 1.32 rounds activations to 8 bits where scales are by axis.
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
        """Gather codes and scales, and multiply them."""
        buffers = {"qdata" if name == "codes" else name: tensor for name, tensor in weight.buffers.items()}
        return super().look_up(replace(weight, buffers=buffers), indices)

    def linear(self, weight: PlainWeight, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x by the column scales, where the weight has some, and then by the rest."""
        return F.linear(weight.scale_columns(x), self.dequantize(weight), bias)


class OnnxRuntime(Onnx):
    """MatMulNBits and GatherBlockQuantized where a weight fits them, ONNX's own ops elsewhere."""

    def buffers(self, weight: QuantizedTensor, uses: Set[Use]) -> dict[str, Tensor]:
        """Return unsigned codes, `[N, blocks, bytes]` for a Linear and `[N, bytes]` for a table, and scales by block.

        A tied weight has them as for a Linear, once. Codes that need more than a scale are as in a file of ONNX.
        """
        stored = super().buffers(weight, uses)
        bits, block_size = _code_bits(weight), _block_size(weight.stored_shape, weight.scale)
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
        bits, codes, scales, zeros = blocks
        # Its input 4, the order of groups, is left out, and input 3 where zeros are as it expects them.
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

    def _blocks(self, weight: PlainWeight) -> tuple[int, Tensor, Tensor, Tensor | None] | None:
        """Return a weight `[N, K]` in blocks of a row, those of the file or what is unpacked; None if it has none.

        These are the bits of a code, codes from 0 on as uint8 `[N, blocks, bytes]`, float32 scales `[N, blocks]`, and
        zeros as uint8 `[N, bytes]`, packed as codes are, or None for the middle of all codes.
        """
        if "blocks" in weight.buffers:
            return _bits(weight), weight.buffers["unsigned"], weight.buffers["blocks"], None
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
        return bits, _packed(numbers.unflatten(-1, [-1, block_size]), bits), _repeated(scales, repeats), zeros


def _code_bits(weight: QuantizedTensor) -> int | None:
    """Return the bits of codes that need nothing but a scale and that ONNX has a type for; None for others."""
    if weight.format.name == Int4.name:
        return 4
    unpacked = weight.format.unpack({name: tensor.to("meta") for name, tensor in weight.tensors.items()})
    is_typed = weight.qdata.dtype in (torch.int8, torch.float8_e4m3fn)
    return 8 if is_typed and unpacked is not None and unpacked.is_codes_times_scale else None


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
