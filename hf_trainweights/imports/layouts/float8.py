"""float8 e4m3 as Transformers' `fp8` and `fbgemm_fp8` write it: one scale a row, a tensor or a block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.imports.layouts.base import Layout
from hf_trainweights.imports.weights import float8_weight, required
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor


class Float8(Layout):
    """float8 e4m3 weights; those in blocks can be held where the scales of a row are equal, as if K is one block."""

    leaves = frozenset(
        ("weight", "weight_scale", "weight_scale_inv", "activation_scale", "input_scale", "input_scale_ub")
    )

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        super().__init__(config, metadata)
        block = config.get("weight_block_size")
        self._block_rows = block[0] if isinstance(block, list) and block and type(block[0]) is int else 1

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor | None:
        """Return the weight of a module; what is known of its activations is left out.

        Args:
            module: Its full name, for errors.
            tensors: Its tensors. `weight_scale_inv` is what codes are multiplied by, in spite of its name.

        Raises:
            CorruptFileError: The scale does not fit the codes.
            UnsupportedError: The scales of a row differ.
        """
        weight = tensors.get("weight")
        scale = tensors.get("weight_scale_inv", tensors.get("weight_scale"))
        if weight is None or (scale is None and weight.dtype != torch.float8_e4m3fn):
            return None
        if scale is None:
            scale = required(module, tensors, "weight_scale")[0]
        return float8_weight(f"{module}.weight", weight, scale, max(1, self._block_rows))
