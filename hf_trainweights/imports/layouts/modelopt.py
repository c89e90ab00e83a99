"""NVIDIA's ModelOpt, as it writes checkpoints of Transformers: NVFP4, MXFP4, float8, MXFP8 and int8.

| | `weight` | `weight_scale` | `weight_scale_2` |
|---|---|---|---|
| NVFP4 | uint8 `[N, K / 2]`, the even column in the low bits | float8_e4m3fn `[N, K / 16]` | float32, one |
| MXFP4 | as NVFP4 | uint8 exponents `[N, K / 32]` | |
| float8 | float8_e4m3fn `[N, K]` | float32: one, `[N]`, or one for each block of 128 rows and columns | |
| MXFP8 | float8_e4m3fn `[N, K]` | uint8 exponents `[N, K / 32]` | |
| int8 | int8 `[N, K]` | float `[N]` or one | |

Values are multiplied by `weight_scale * weight_scale_2`, which is rounded to float32; the product is rounded to float32
and then to the dtype. The dtypes and shapes tell which one a weight is.
Source: https://github.com/NVIDIA/Model-Optimizer
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.imports.layouts.base import (
    EXPONENTS,
    TENSOR_SHAPES,
    Layout,
    block_shape,
    channel_shapes,
    check_tensor,
    matrix,
    unsupported,
)
from hf_trainweights.imports.layouts.weights import exponents, float8_weight, integer_weight, table_weight
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

NVFP4_GROUP_SIZE = 16
MX_GROUP_SIZE = 32
_BLOCK = (128, 128)
# Tensors by which the input of a layer is changed, or something is added to its output.
_OTHER_PRODUCTS = ("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b")


class ModelOpt(Layout):
    """Weights of 4 and 8 bits. Scales of activations are ignored."""

    marks = frozenset(("weight_scale", "weight_scale_2", *_OTHER_PRODUCTS))
    leaves = marks | {"weight", "input_scale"}

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module."""
        name = f"{module}.weight"
        for leaf in _OTHER_PRODUCTS:
            if leaf in tensors:
                raise unsupported(f"{module}.{leaf}", "weights that are used as they are", "this tensor")
        codes = tensors.get("weight")
        if codes is not None and codes.dtype is torch.uint8:
            return self._four_bits(name, module, tensors)
        N, K = matrix(module, tensors, "weight", torch.float8_e4m3fn, torch.int8)
        scale = tensors.get("weight_scale")
        shapes = [*TENSOR_SHAPES, *channel_shapes(N)]
        if tensors["weight"].dtype is torch.int8:
            check_tensor(module, tensors, "weight_scale", FLOAT_DTYPES, *shapes)
            return integer_weight(name, tensors["weight"].view(torch.uint8) ^ 128, tensors["weight_scale"], bits=8)
        if scale is not None and scale.dtype is torch.uint8:
            check_tensor(module, tensors, "weight_scale", EXPONENTS, (N, -(-K // MX_GROUP_SIZE)))
            return float8_weight(name, tensors["weight"], scale, (1, MX_GROUP_SIZE))
        R, C = block_shape(N, K, _BLOCK)
        check_tensor(module, tensors, "weight_scale", FLOAT_DTYPES, *shapes, (R, C), (R, 1, C, 1))
        scale = tensors["weight_scale"]
        return float8_weight(name, tensors["weight"], scale.view(R, C) if scale.dim() == 4 else scale, _BLOCK)

    def _four_bits(self, name: str, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        N, half = matrix(module, tensors, "weight", torch.uint8)
        K, scale = 2 * half, tensors.get("weight_scale")
        if scale is not None and scale.dtype in FLOAT_DTYPES:
            raise unsupported(name, "four bits of NVFP4 or MXFP4", f"scales in {scale.dtype}, as of integers")
        if scale is not None and scale.dtype is torch.uint8:
            check_tensor(module, tensors, "weight_scale", EXPONENTS, (N, K // MX_GROUP_SIZE))
            return table_weight(name, tensors["weight"], MX_GROUP_SIZE, "e8m0", {"scale": exponents(name, scale)})
        check_tensor(module, tensors, "weight_scale", (torch.float8_e4m3fn,), (N, K // NVFP4_GROUP_SIZE))
        check_tensor(module, tensors, "weight_scale_2", FLOAT_DTYPES, *TENSOR_SHAPES)
        scales = {
            "scale": tensors["weight_scale"],
            "global_scale": tensors["weight_scale_2"].float().view(1, 1).expand(N, 1),
        }
        return table_weight(name, tensors["weight"], NVFP4_GROUP_SIZE, "e4m3", scales)
