"""float8 e4m3 as Transformers' `fp8` and `fbgemm_fp8` write it: one scale a row, a tensor or a block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.imports.layouts.base import Layout, Part, block_size, matrix
from hf_trainweights.imports.weights import FLOAT8_SCALES, TENSOR_SHAPES, block_shape, channel_shapes, float8_weight
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor


class Float8(Layout):
    """float8 e4m3 weights; those in blocks can be held where the scales of a row are equal, as if K is one block."""

    leaves = frozenset(
        ("weight", "weight_scale", "weight_scale_inv", "activation_scale", "input_scale", "input_scale_ub")
    )
    marks = frozenset(("weight_scale", "weight_scale_inv"))

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        super().__init__(config, metadata)
        self._block = block_size(config, "weight_block_size")
        self._of_rows = config.get("quant_method") == "fbgemm_fp8"

    def _scale(self, tensors: Mapping[str, Tensor]) -> str:
        """Return the name of the scale; codes are multiplied by `weight_scale_inv` in spite of its name."""
        older = self._of_rows or ("weight_scale" in tensors and "weight_scale_inv" not in tensors)
        return "weight_scale" if older else "weight_scale_inv"

    def parts(self, module: str, tensors: Mapping[str, Tensor]) -> dict[str, Part]:
        """Return what the tensors of a quantized weight have to be."""
        N, K = matrix(module, tensors, "weight", torch.float8_e4m3fn)
        shapes = channel_shapes(N) if self._of_rows else (*TENSOR_SHAPES, *channel_shapes(N))
        if self._block is not None:
            shapes = (block_shape(N, K, self._block),)
        return {"weight": Part((torch.float8_e4m3fn,), ((N, K),)), self._scale(tensors): Part(FLOAT8_SCALES, shapes)}

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module; what is known of its activations is left out."""
        rows = self._block[0] if self._block else 1
        return float8_weight(f"{module}.weight", tensors["weight"], tensors[self._scale(tensors)], rows)
