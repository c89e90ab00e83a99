"""GPTQ, as GPTQModel and AutoGPTQ write it: words packed along K, one column of words for each output feature.

`qweight` int32 `[K * bits / 32, N]`, `scales` float16 `[G, N]`, `qzeros` int32 `[G, N * bits / 32]`, `g_idx` `[K]`.
Files of version 1 store the zero point less one. Source: https://github.com/ModelCloud/GPTQModel
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.imports.layouts.base import INTEGERS, WHERE, Layout, Part, integer, matrix, no_place
from hf_trainweights.imports.layouts.compressed_tensors import unpack
from hf_trainweights.imports.weights import asymmetric_weight, check_groups, check_groups_in_order, group_count
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# What the stored zero point lacks, by `checkpoint_format`.
_MISSING = {"gptq": 1, "gptq_v2": 0}


class Gptq(Layout):
    """Weights of 4 or 8 bits, with a zero point for each group."""

    leaves = marks = frozenset(("qweight", "qzeros", "scales", "g_idx"))

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        super().__init__(config, metadata)
        self._bits, version = integer(config, "bits"), config.get("checkpoint_format", "gptq")
        if self._bits not in (4, 8):
            raise no_place(f"{WHERE}: bits", "4 or 8", f"{self._bits}")
        if not isinstance(version, str) or version not in _MISSING:
            raise no_place(f"{WHERE}: checkpoint_format", "gptq or gptq_v2", repr(version))
        self._missing, self._group_size = _MISSING[version], integer(config, "group_size")

    def parts(self, module: str, tensors: Mapping[str, Tensor]) -> dict[str, Part]:
        """Return what the tensors of a quantized weight have to be."""
        words, N = matrix(module, tensors, "qweight", torch.int32)
        K = words * 32 // self._bits
        check_groups(f"{module}.weight", K, self._group_size)
        G = group_count(K, self._group_size)
        return {
            "scales": Part(FLOAT_DTYPES, ((G, N),)),
            "qzeros": Part((torch.int32,), ((G, -(-N * self._bits // 32)),)),
            # Without it the groups of desc_act are not known.
            "g_idx": Part(INTEGERS, ((K,),), required=bool(self.config.get("desc_act"))),
        }

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module."""
        name, scale = f"{module}.weight", tensors["scales"].t()
        codes = unpack(tensors["qweight"].t(), self._bits)
        zero = unpack(tensors["qzeros"], self._bits)[:, : len(codes)].t()
        if self._missing and bool((zero == 2 ** (self._bits - 1) - 1).any()):
            found = "the largest number, which lacks one: 0, or 2^bits"
            raise no_place(name, "zero points that readers agree on", found)
        if "g_idx" in tensors:
            check_groups_in_order(name, tensors["g_idx"], codes.shape[1], scale.shape[1])
        return asymmetric_weight(name, codes, scale, zero + self._missing, self._bits)
