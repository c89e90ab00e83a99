"""gpt-oss: the merged experts of a layer in MXFP4.

| tensor | shape | dtype |
|---|---|---|
| `gate_up_proj_blocks`, `down_proj_blocks`: two codes in a byte, the even one low | `[E, N, K / 32, 16]` | uint8 |
| `gate_up_proj_scales`, `down_proj_scales`: exponents | `[E, N, K / 32]` | uint8 |

`weight = value * 2**(scale - 127)`, exact in float32. The model keeps the weight transposed, `[E, K, N]`. The rows of
its gate and up projections alternate there as here. Format: OCP Microscaling Formats (MX) 1.0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from hf_trainweights.imports.layouts.base import EXPONENTS, Layout, check_tensor
from hf_trainweights.imports.layouts.weights import exponents, table_weight
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

GROUP_SIZE = 32
_NAME = re.compile(r"(?P<weight>.*\.(?:gate_up_proj|down_proj))_(?P<leaf>blocks|scales)", re.DOTALL)


class Mxfp4(Layout):
    """Merged experts of four bits."""

    leaves = marks = frozenset(("blocks", "scales"))

    def split_name(self, name: str) -> tuple[str, str]:
        """Split a tensor's name; a module of experts has two weights, so that the weight's name stands for it."""
        match = _NAME.fullmatch(name)
        return (match["weight"], match["leaf"]) if match else super().split_name(name)

    def weight_name(self, module: str) -> str:
        """Return the name of a weight."""
        return module

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return a weight of merged experts."""
        check_tensor(module, tensors, "blocks", (torch.uint8,), (None, None, None, GROUP_SIZE // 2))
        check_tensor(module, tensors, "scales", EXPONENTS, tuple(tensors["blocks"].shape[:-1]))
        scale = exponents(module, tensors["scales"])
        return table_weight(module, tensors["blocks"].flatten(-2), GROUP_SIZE, "e8m0", {"scale": scale})
