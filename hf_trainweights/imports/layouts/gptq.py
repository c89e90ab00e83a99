"""GPTQ, as GPTQModel and AutoGPTQ write it: words packed along K, one column of words for each output feature.

`qweight` int32 `[K * bits / 32, N]`, `scales` float16 `[G, N]`, `qzeros` int32 `[G, N * bits / 32]`, `g_idx` `[K]`.
Files of version 1 store the zero point less one. Source: https://github.com/ModelCloud/GPTQModel
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hf_trainweights.imports.asymmetric import asymmetric_weight
from hf_trainweights.imports.layouts.base import WHERE, Layout, integer, no_place
from hf_trainweights.imports.layouts.compressed_tensors import unpack
from hf_trainweights.imports.weights import check_groups, check_groups_in_order, check_words, required
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# What the stored zero point lacks, by `checkpoint_format`.
_MISSING = {"gptq": 1, "gptq_v2": 0}


class Gptq(Layout):
    """Weights of 4 or 8 bits, with a zero point for each group."""

    leaves = frozenset(("qweight", "qzeros", "scales", "g_idx"))

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        super().__init__(config, metadata)
        self._bits, version = integer(config, "bits"), config.get("checkpoint_format", "gptq")
        if self._bits not in (4, 8):
            raise no_place(f"{WHERE}: bits", "4 or 8", f"{self._bits}")
        if not isinstance(version, str) or version not in _MISSING:
            raise no_place(f"{WHERE}: checkpoint_format", "gptq or gptq_v2", repr(version))
        self._missing, self._group_size = _MISSING[version], integer(config, "group_size")

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor | None:
        """Return the weight of a module.

        Args:
            module: Its full name, for errors.
            tensors: Its tensors.

        Raises:
            CorruptFileError: A tensor is missing, or one does not fit the others.
            UnsupportedError: The groups are by activation order, or a zero point cannot be held or told.
        """
        if "qweight" not in tensors:
            return None
        name = f"{module}.weight"
        words, zeros, scales = required(module, tensors, "qweight", "qzeros", "scales")
        check_words(f"{module}.qweight", words)
        codes, scale = unpack(words.t(), self._bits), scales.mT if scales.dim() == 2 else scales
        N, K = codes.shape
        check_groups(name, scale, K, self._group_size)
        check_words(f"{module}.qzeros", zeros, (scale.shape[1], -(-N * self._bits // 32)))
        zero = unpack(zeros, self._bits)[:, :N].t()
        if self._missing and bool((zero == 2 ** (self._bits - 1) - 1).any()):
            raise no_place(
                name, "zero points that readers agree on", "the largest number, which lacks one: 0, or 2^bits"
            )
        if "g_idx" in tensors:
            check_groups_in_order(name, tensors["g_idx"], K, scale.shape[-1])
        elif self.config.get("desc_act"):
            raise no_place(name, "groups of neighbouring columns", "desc_act without a g_idx that says which")
        return asymmetric_weight(name, codes, scale, zero + self._missing, self._bits)
