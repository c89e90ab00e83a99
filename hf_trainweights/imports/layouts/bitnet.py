"""BitNet: weights of -1, 0 and 1 with one scale for the weight, as Transformers' `bitnet` saves them.

| tensor | shape | dtype |
|---|---|---|
| `weight`: two bits of code + 1 | `[N / 4, K]` | uint8 |
| `weight_scale` | `[1]` | float |

Byte row i holds row i of each quarter of the rows, that of the first quarter in the lowest bits. The weight is
`code / weight_scale`, and `code * weight_scale` for the class `autobitlinear`. Activations are rounded to eight bits
there, which is left out here. Source: Transformers' integrations/bitnet.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.imports.layouts.base import (
    AGAIN,
    TENSOR_SHAPES,
    WHERE,
    Layout,
    check_tensor,
    matrix,
    unsupported,
)
from hf_trainweights.imports.layouts.weights import integer_weight
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

_BITS = 2


class BitNet(Layout):
    """Ternary weights."""

    leaves = frozenset(("weight", "weight_scale"))
    marks = frozenset(("weight_scale",))

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        super().__init__(config, metadata)
        self._multiplies = config.get("linear_class", "bitlinear") == "autobitlinear"
        if config.get("use_rms_norm"):
            raise unsupported(f"{WHERE}: use_rms_norm", "layers that are products alone", "a norm before each")
        if self._multiplies and config.get("quantization_mode", "offline") != "offline":
            mode = repr(config["quantization_mode"])
            raise unsupported(f"{WHERE}: quantization_mode", "offline, weights that are ternary", mode)

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module."""
        name = f"{module}.weight"
        packed_rows, K = matrix(module, tensors, "weight", torch.uint8)
        N = packed_rows * 8 // _BITS
        if self.shapes.get(module, (N, K)) != (N, K):
            expected = f"the codes of {self.shapes[module]} weights, four in a byte"
            raise CorruptFileError(name, expected, f"shape {(packed_rows, K)}", AGAIN)
        check_tensor(module, tensors, "weight_scale", FLOAT_DTYPES, *TENSOR_SHAPES)
        codes = torch.cat([(tensors["weight"] >> start) & 3 for start in range(0, 8, _BITS)])
        scale = tensors["weight_scale"].reshape(1).float()
        scale = scale if self._multiplies else 1 / scale
        return integer_weight(name, codes, scale, _BITS, torch.ones(1, dtype=torch.int32))
