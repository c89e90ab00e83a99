"""bitsandbytes' LLM.int8: int8 rows, and the largest magnitude of each.

`weight` int8 `[N, K]`, `SCB` float32 `[N]`, `weight_format` uint8, 0 for rows, which the first files did not have.
A weight is `code * SCB / 127`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.imports.layouts.base import INTEGERS, WHERE, Layout, Part, matrix, no_place
from hf_trainweights.imports.weights import integer_weight
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

    def parts(self, module: str, tensors: Mapping[str, Tensor]) -> dict[str, Part]:
        """Return what the tensors of a quantized weight have to be."""
        N, K = matrix(module, tensors, "weight", torch.int8)
        return {
            "weight": Part((torch.int8,), ((N, K),)),
            "SCB": Part(FLOAT_DTYPES, ((N,),)),
            "weight_format": Part(INTEGERS, ((), (1,)), required=False),
        }

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module; its scale is SCB / 127, rounded to float32."""
        order = tensors.get("weight_format")
        if order is not None and bool(order.any()):
            raise no_place(f"{module}.weight_format", "0, rows", f"{order.tolist()}")
        return integer_weight(f"{module}.weight", tensors["weight"], tensors["SCB"].float() / 127, bits=8)
