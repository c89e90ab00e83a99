"""GPTQ and AWQ: codes of 4 or 8 bits in int32 words, one column for each output feature, and zero points by group.

| | `qweight` int32 | `scales` float16 | `qzeros` int32 |
|---|---|---|---|
| GPTQ, as GPTQModel and AutoGPTQ write it | `[K * bits / 32, N]`, packed along K | `[G, N]` | `[G, N * bits / 32]` |
| AWQ, as AutoAWQ's `gemm` writes it | `[K, N / 8]`, packed along N, as its kernel reads | `[G, N]` | `[G, N / 8]` |

GPTQ has `g_idx` `[K]` besides, and its files of version 1 store the zero point less one.
Sources: https://github.com/ModelCloud/GPTQModel, https://github.com/casper-hansen/AutoAWQ
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.packing import CODES_PER_WORD, unpack_int4
from hf_trainweights.imports.layouts.base import (
    INTEGERS,
    WHERE,
    Layout,
    asymmetric_weight,
    check_groups,
    check_groups_in_order,
    check_tensor,
    group_count,
    integer,
    matrix,
    no_place,
    unpack,
)
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# What GPTQ's stored zero point lacks, by `checkpoint_format`.
_MISSING = {"gptq": 1, "gptq_v2": 0}
# In which of a word's eight places, from the lowest, each of AWQ's columns lies.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


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

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module."""
        name, bits = f"{module}.weight", self._bits
        words, N = matrix(module, tensors, "qweight", torch.int32)
        K = words * 32 // bits
        check_groups(name, K, self._group_size)
        G = group_count(K, self._group_size)
        check_tensor(module, tensors, "scales", FLOAT_DTYPES, (G, N))
        check_tensor(module, tensors, "qzeros", (torch.int32,), (G, -(-N * bits // 32)))
        # Without it the groups of desc_act are not known.
        check_tensor(module, tensors, "g_idx", INTEGERS, (K,), required=bool(self.config.get("desc_act")))
        codes = unpack(tensors["qweight"].t(), bits)
        zero = unpack(tensors["qzeros"], bits)[:, :N].t()
        if self._missing and bool((zero == 2 ** (bits - 1) - 1).any()):
            found = "the largest number, which lacks one: 0, or 2^bits"
            raise no_place(name, "zero points that readers agree on", found)
        if "g_idx" in tensors:
            check_groups_in_order(name, tensors["g_idx"], K, G)
        return asymmetric_weight(name, codes, tensors["scales"].t(), zero + self._missing, bits)


class Awq(Layout):
    """Weights of 4 bits, with a zero point for each group."""

    leaves = marks = frozenset(("qweight", "qzeros", "scales"))

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        super().__init__(config, metadata)
        bits = integer(config, "bits")
        if bits != 4:
            raise no_place(f"{WHERE}: bits", "4", f"{bits}")
        self._group_size = integer(config, "group_size")
        version = str(config.get("version", config.get("format", "gemm"))).lower()
        if version != "gemm":
            raise no_place(f"{WHERE}: version", "gemm", repr(version))

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module."""
        K, words = matrix(module, tensors, "qweight", torch.int32)
        check_groups(f"{module}.weight", K, self._group_size)
        G = group_count(K, self._group_size)
        check_tensor(module, tensors, "scales", FLOAT_DTYPES, (G, words * CODES_PER_WORD))
        check_tensor(module, tensors, "qzeros", (torch.int32,), (G, words))
        codes, zero = (_columns(tensors[leaf]).t() for leaf in ("qweight", "qzeros"))
        return asymmetric_weight(f"{module}.weight", codes, tensors["scales"].t(), zero, bits=4)


def _columns(words: Tensor) -> Tensor:
    """Return AWQ's words `[R, N / 8]` as codes `[R, N]` of -8 to 7."""
    return unpack_int4(words).unflatten(-1, (-1, CODES_PER_WORD))[..., _PLACES].flatten(-2)
