"""Standard ONNX: DequantizeLinear of the codes as they lie, and plain arithmetic on those that it cannot read.

https://onnx.ai/onnx/operators/onnx__DequantizeLinear.html
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.exports.targets.base import PlainWeight, Target, Use
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

BLOCKS_OPSET = 21
"""The first version of ONNX that has INT4 and scales for blocks of a row."""

STORED = "hf_trainweights::Stored"
"""An op that returns its input, until `onnx.stored_tensors` takes it out of the graph. Exporters would compute what
follows from a constant of up to 8,192 elements and write the result instead, but know nothing of this op."""


class Onnx(Target):
    """ONNX's own ops, which every runtime of ONNX knows.

    int4 words are in the graph as int32 while PyTorch traces; `onnx.stored_tensors` gives them their type.
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
        if code_bits(weight) is None or (Use.TABLE in uses and weight.qdata.dtype != torch.int8):
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


def code_bits(weight: QuantizedTensor) -> int | None:
    """Return the bits of codes that need nothing but a scale and that ONNX has a type for; None for others."""
    if weight.format.name == Int4.name:
        return 4
    unpacked = weight.format.unpack({name: tensor.to("meta") for name, tensor in weight.tensors.items()})
    is_typed = weight.qdata.dtype in (torch.int8, torch.float8_e4m3fn)
    return 8 if is_typed and unpacked is not None and unpacked.is_codes_times_scale else None
