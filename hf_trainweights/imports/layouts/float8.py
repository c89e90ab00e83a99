"""Transformers' float8: e4m3 codes with one scale for the weight, a row or a block, and experts in MXFP4 beside them.

| tensor | shape | dtype |
|---|---|---|
| `weight` | `[N, K]` | float8_e4m3fn; for MXFP4 int8 `[N, K / 2]`, the even column in the low bits |
| `weight_scale_inv`, `scale`, `qscale_weight` or `weight_scale` | one, `[N]`, `[N, 1]`, or a block's | float, uint8 |

`weight = code * scale`, rounded to float32 and then to the dtype of the model, despite the scale's name. A block has
the rows and columns of `weight_block_size`, and the last ones may have fewer. Scales in float8_e8m0fnu or uint8 are
exponents; their blocks have 32 columns of one row, if the shape of the scales says so. Experts in one tensor, such as
`experts.down_proj` `[E, N, K]`, have their blocks' scales in `experts.down_proj_scale_inv`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.imports.layouts.base import (
    EXPONENTS,
    FLOAT8_SCALES,
    TENSOR_SHAPES,
    Layout,
    block_shape,
    block_size,
    channel_shapes,
    check_tensor,
    matrix,
    unsupported,
)
from hf_trainweights.imports.layouts.weights import exponents, float8_weight, table_weight
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

_MX_COLUMNS = 32
# The names of the scales. The first is the usual one; DeepSeek V4, Mistral and fbgemm have the others.
_SCALE_NAMES = ("weight_scale_inv", "scale", "qscale_weight", "weight_scale")
# The names of experts in one tensor, and of their scales.
_EXPERTS = re.compile(r"(?P<weight>.*\bexperts\.(?:gate_up_proj|up_proj|down_proj))(?P<leaf>_scale_inv|)", re.DOTALL)


class Float8(Layout):
    """Float8 e4m3 weights, and experts of four bits. Scales of activations are ignored."""

    leaves = frozenset((*_SCALE_NAMES, "weight", "activation_scale", "input_scale", "input_scale_ub"))
    marks = frozenset(("weight_scale", "weight_scale_inv", "qscale_weight"))

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        super().__init__(config, metadata)
        self._block = block_size(config, "weight_block_size")
        self._scale_per_row = config.get("quant_method") == "fbgemm_fp8"
        self._experts: set[str] = set()

    def split_name(self, name: str) -> tuple[str, str]:
        """Split a tensor's name; the name of experts in one tensor stands for their module."""
        match = _EXPERTS.fullmatch(name)
        return (match["weight"], f"weight{match['leaf']}") if match else super().split_name(name)

    def weight_name(self, module: str) -> str:
        """Return the name of a weight."""
        return module if module in self._experts else super().weight_name(module)

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module."""
        name, codes = f"{module}.weight", tensors.get("weight")
        if codes is not None and codes.dim() > 2 and _EXPERTS.fullmatch(module):
            return self._weight_of_experts(module, tensors)
        if codes is not None and codes.dtype is torch.float8_e5m2:
            raise unsupported(name, "float8 codes of e4m3", "e5m2")
        usual_name = "weight_scale" if self._scale_per_row else _SCALE_NAMES[0]
        scale_name = next((leaf for leaf in _SCALE_NAMES if leaf in tensors), usual_name)
        if codes is not None and codes.dtype is torch.int8:
            N, half = matrix(module, tensors, "weight", torch.int8)
            check_tensor(module, tensors, scale_name, EXPONENTS, (N, 2 * half // _MX_COLUMNS))
            scale = exponents(name, tensors[scale_name])
            return table_weight(name, codes.view(torch.uint8), _MX_COLUMNS, "e8m0", {"scale": scale})
        N, K = matrix(module, tensors, "weight", torch.float8_e4m3fn)
        shapes = channel_shapes(N) if self._scale_per_row else (*TENSOR_SHAPES, *channel_shapes(N))
        if self._block is not None:
            shapes = (block_shape(N, K, self._block),)
        dtypes, scale, block = FLOAT8_SCALES, tensors.get(scale_name), self._block or (1, K)
        if scale is not None and scale.dtype in EXPONENTS and tuple(scale.shape) == (N, -(-K // _MX_COLUMNS)):
            shapes, dtypes, block = (tuple(scale.shape),), EXPONENTS, (1, _MX_COLUMNS)
        check_tensor(module, tensors, scale_name, (*dtypes, *EXPONENTS), *shapes)
        return float8_weight(name, tensors["weight"], tensors[scale_name], block)

    def _weight_of_experts(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of experts in one tensor, in blocks."""
        if self._block is None:
            raise unsupported(module, "experts in one tensor with weight_block_size", "none")
        check_tensor(module, tensors, "weight", (torch.float8_e4m3fn,), (None, None, None))
        E, N, K = tensors["weight"].shape
        shape = (E, *block_shape(N, K, self._block))
        check_tensor(module, tensors, _SCALE_NAMES[0], FLOAT8_SCALES, shape)
        self._experts.add(module)
        return float8_weight(module, tensors["weight"], tensors[_SCALE_NAMES[0]], self._block)
