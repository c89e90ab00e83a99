"""ONNX Runtime's own ops, which multiply with the codes.

https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md: MatMulNBits, GatherBlockQuantized.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_trainweights.exports.targets.aten import scaled
from hf_trainweights.exports.targets.base import PlainWeight, Use
from hf_trainweights.exports.targets.onnx import Onnx
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

_BITS = {"int8": 8, "int4": 4}

# The lengths of blocks that MatMulNBits knows, the longest first: it has the fewest scales.
_BLOCK_SIZES = (256, 128, 64, 32, 16)


class OnnxRuntime(Onnx):
    """MatMulNBits and GatherBlockQuantized where a weight fits them, ONNX's own ops elsewhere."""

    name = "ONNX Runtime"

    def buffers(self, weight: QuantizedTensor, uses: Set[Use]) -> dict[str, Tensor]:
        """Return unsigned codes, `[N, blocks, bytes]` for a Linear and `[N, bytes]` for a table, and scales by block.

        A tied weight has them as for a Linear, once.
        """
        stored = super().buffers(weight, uses)
        bits, block_size = _BITS.get(weight.format.name), self._block_size(weight)
        if bits is None or block_size is None or Use.OTHER in uses:
            return stored
        # int4 words hold unsigned codes already; int8 becomes unsigned with its sign bit flipped.
        unsigned = weight.qdata.view(torch.uint8) if bits == 4 else weight.qdata.view(torch.uint8) ^ 0x80
        if Use.LINEAR in uses:
            # Exporters would write the result of an op on it beside it.
            unsigned = unsigned.unflatten(-1, (-1, block_size * bits // 8))
        scale = stored["scale"]
        repeats = weight.stored_shape[-1] // scale.shape[-1] // block_size
        return stored | {"unsigned": unsigned, "blocks": scale.repeat_interleave(repeats, dim=-1)}

    def linear(self, weight: PlainWeight, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by MatMulNBits."""
        stored = weight.buffers
        if "blocks" not in stored:
            return super().linear(weight, x, bias)
        N, G = stored["blocks"].shape
        attributes: dict[str, Any] = {
            "K": weight.columns,
            "N": N,
            "bits": _BITS[weight.format.name],
            "block_size": weight.columns // G,
        }
        # Its inputs 3 and 4, zero points and the order of groups, are left out.
        inputs = (x, stored["unsigned"], stored["blocks"], *((None, None, bias) if bias is not None else ()))
        shape = (*x.shape[:-1], N)
        return torch.onnx.ops.symbolic(
            "com.microsoft::MatMulNBits", inputs, attrs=attributes, dtype=weight.dtype, shape=shape, version=1
        )

    def look_up(self, weight: PlainWeight, indices: Tensor) -> Tensor:
        """Look rows up by GatherBlockQuantized, or by ONNX's own ops where they lie as for MatMulNBits."""
        stored = weight.buffers
        if "blocks" not in stored:
            return super().look_up(weight, indices)
        if stored["unsigned"].dim() == 3:
            rows = stored["unsigned"].index_select(0, indices.flatten()).view(*indices.shape, -1)
            codes = self._codes(weight, rows) if weight.format.name == "int4" else rows.to(weight.dtype) - 128
            return scaled(codes, F.embedding(indices, stored["blocks"]))
        attributes: dict[str, Any] = {
            "gather_axis": 0,
            "quantize_axis": 1,
            "block_size": weight.columns // stored["blocks"].shape[-1],
            "bits": _BITS[weight.format.name],
        }
        return torch.onnx.ops.symbolic(
            "com.microsoft::GatherBlockQuantized",
            (stored["unsigned"], indices, stored["blocks"]),
            attrs=attributes,
            dtype=weight.dtype,
            shape=(*indices.shape, weight.columns),
            version=1,
        )

    @staticmethod
    def _block_size(weight: QuantizedTensor) -> int | None:
        if weight.dim() != 2:
            return None
        group_size = weight.stored_shape[-1] // weight.scale.shape[-1]
        return next((size for size in _BLOCK_SIZES if group_size % size == 0), None)
