"""Standard ONNX: DequantizeLinear of the codes as they lie.

https://onnx.ai/onnx/operators/onnx__DequantizeLinear.html
"""

from __future__ import annotations

from collections.abc import Set

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.exports.targets.aten import scaled
from hf_trainweights.exports.targets.base import PlainWeight, Target, Use
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

BLOCKS_OPSET = 21
"""The first version of ONNX that has INT4 and scales for blocks of a row."""

# Exporters compute ops on constants of up to so many elements and write the result, but never DequantizeLinear:
# DEFAULT_CONSTANT_FOLD_INPUT_SIZE_LIMIT of onnxscript.
_FOLDED_ELEMENTS = 8192


class Onnx(Target):
    """ONNX's own ops, which every runtime of ONNX knows.

    int4 words are in the graph as int32 while PyTorch traces; `int4_initializers.retype` gives them their type.
    """

    name = "ONNX"

    def buffers(self, weight: QuantizedTensor, uses: Set[Use]) -> dict[str, Tensor]:
        """Return the stored tensors, and the bytes of a table whose codes are not int8: no runtime looks up others.

        Raises:
            UnsupportedError: The weight computes in another dtype than float32.
        """
        if weight.dtype != torch.float32:
            raise UnsupportedError(
                "model",
                "a model in float32, in which ONNX's runtimes compute on every machine",
                f"weights in {weight.dtype}",
                "Load it with dtype=torch.float32: codes and scales stay as they are.",
            )
        stored = {"qdata": weight.qdata, "scale": weight.scale.to(weight.dtype)}
        if Use.TABLE in uses and weight.format.name != "int8":
            stored["octets"] = weight.qdata.view(torch.uint8)
        if Use.TABLE in uses and weight.format.name == "float8_e4m3":
            stored["values"] = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().unsqueeze(-1)
        return stored

    def dequantize(self, weight: PlainWeight) -> Tensor:
        """Return DequantizeLinear of the codes, with one scale for each block of a row.

        A row with one scale is one block: ONNX Runtime 1.32 rounds activations to 8 bits where scales are by axis.
        A table is computed from the bytes that it looks up, so a tied weight is in the file once.
        """
        qdata = weight.buffers["qdata"]
        if "octets" in weight.buffers:
            octets = weight.buffers["octets"]
            return scaled(self._codes(weight, _kept(octets)), weight.buffers["scale"])
        return torch.onnx.ops.symbolic(
            "DequantizeLinear",
            (qdata, weight.buffers["scale"]),
            attrs={"axis": qdata.dim() - 1, "block_size": weight.columns // weight.groups},
            dtype=weight.dtype,
            shape=(*qdata.shape[:-1], weight.columns),
            version=BLOCKS_OPSET,
        )

    def look_up(self, weight: PlainWeight, indices: Tensor) -> Tensor:
        """Gather codes and scales, and multiply them."""
        stored = weight.buffers
        if stored.get("octets", stored["qdata"]).numel() <= _FOLDED_ELEMENTS:
            # Positions may be constants, so that nothing but the weight's own op keeps its rows from being computed.
            return F.embedding(indices, self.dequantize(weight))
        scale = F.embedding(indices, stored["scale"])
        if weight.format.name == "int8":
            return scaled(F.embedding(indices, stored["qdata"]).to(weight.dtype), scale)
        return scaled(self._codes(weight, F.embedding(indices, stored["octets"])), scale)

    @staticmethod
    def _codes(weight: PlainWeight, octets: Tensor) -> Tensor:
        """Return the codes that bytes of a table hold, in the weight's dtype."""
        numbers = octets.to(torch.int32)
        if weight.format.name == "int4":
            return torch.stack([numbers & 15, numbers >> 4], -1).flatten(-2).to(weight.dtype) - 8
        return F.embedding(numbers, weight.buffers["values"]).squeeze(-1)


def _kept(octets: Tensor) -> Tensor:
    """Return bytes from which an exporter does not compute the float weight, to write it instead of them."""
    if octets.numel() > _FOLDED_ELEMENTS:
        return octets
    inputs = (octets, torch.ones((), dtype=torch.float32))
    return torch.onnx.ops.symbolic(
        "DequantizeLinear", inputs, dtype=torch.float32, shape=octets.shape, version=BLOCKS_OPSET
    )
