"""Codes of 8 bits beside their scales: bitsandbytes' LLM.int8, and Transformers' own float8 e4m3.

LLM.int8 has `weight` int8 `[N, K]`, `SCB` float32 `[N]`, the largest magnitude of each row, and `weight_format` uint8,
0 for rows, which the first files did not have: a weight is `code * SCB / 127`. `fp8` and `fbgemm_fp8` have one scale a
row, a tensor or a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.imports.layouts.base import (
    FLOAT8_SCALES,
    INTEGERS,
    TENSOR_SHAPES,
    WHERE,
    Layout,
    block_shape,
    block_size,
    channel_shapes,
    check_tensor,
    float8_weight,
    integer_weight,
    matrix,
    no_place,
)
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor


class BitsAndBytes(Layout):
    """int8 weights. nf4 and fp4 have no evenly spaced codes, so no format of this package holds them."""

    leaves = frozenset(("weight", "SCB", "weight_format"))
    marks = frozenset(("SCB", "weight_format"))

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        super().__init__(config, metadata)
        if not config.get("load_in_8bit", config.get("_load_in_8bit")):
            found = f"{config.get('bnb_4bit_quant_type', '4 bits')}, whose codes are not evenly spaced"
            raise no_place(f"{WHERE}: load_in_4bit", "int8 (load_in_8bit)", found)

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module; its scale is SCB / 127, rounded to float32."""
        N, _ = matrix(module, tensors, "weight", torch.int8)
        check_tensor(module, tensors, "SCB", FLOAT_DTYPES, (N,))
        check_tensor(module, tensors, "weight_format", INTEGERS, (), (1,), required=False)
        order = tensors.get("weight_format")
        if order is not None and bool(order.any()):
            raise no_place(f"{module}.weight_format", "0, rows", f"{order.tolist()}")
        return integer_weight(f"{module}.weight", tensors["weight"], tensors["SCB"].float() / 127, bits=8)


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

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module; what is known of its activations is left out."""
        N, K = matrix(module, tensors, "weight", torch.float8_e4m3fn)
        # Codes are multiplied by `weight_scale_inv` in spite of its name.
        older = self._of_rows or ("weight_scale" in tensors and "weight_scale_inv" not in tensors)
        scale = "weight_scale" if older else "weight_scale_inv"
        shapes = channel_shapes(N) if self._of_rows else (*TENSOR_SHAPES, *channel_shapes(N))
        if self._block is not None:
            shapes = (block_shape(N, K, self._block),)
        check_tensor(module, tensors, scale, FLOAT8_SCALES, *shapes)
        rows = self._block[0] if self._block else 1
        return float8_weight(f"{module}.weight", tensors["weight"], tensors[scale], rows)
