"""AWQ, as AutoAWQ's `gemm` writes it: words packed along N, in the order that its kernel reads.

`qweight` int32 `[K, N / 8]`, `scales` float16 `[G, N]`, `qzeros` int32 `[G, N / 8]`. Source:
https://github.com/casper-hansen/AutoAWQ
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.packing import CODES_PER_WORD, unpack_int4
from hf_trainweights.imports.layouts.base import WHERE, Layout, Part, integer, matrix, no_place
from hf_trainweights.imports.weights import asymmetric_weight, check_groups, group_count
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# In which of a word's eight places, from the lowest, each of its columns lies.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


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

    def parts(self, module: str, tensors: Mapping[str, Tensor]) -> dict[str, Part]:
        """Return what the tensors of a quantized weight have to be."""
        K, words = matrix(module, tensors, "qweight", torch.int32)
        check_groups(f"{module}.weight", K, self._group_size)
        G = group_count(K, self._group_size)
        return {
            "scales": Part(FLOAT_DTYPES, ((G, words * CODES_PER_WORD),)),
            "qzeros": Part((torch.int32,), ((G, words),)),
        }

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module."""
        codes, zero = (_columns(tensors[leaf]).t() for leaf in ("qweight", "qzeros"))
        return asymmetric_weight(f"{module}.weight", codes, tensors["scales"].t(), zero, bits=4)


def _columns(words: Tensor) -> Tensor:
    """Return words `[R, N / 8]` as codes `[R, N]` of -8 to 7."""
    return unpack_int4(words).unflatten(-1, (-1, CODES_PER_WORD))[..., _PLACES].flatten(-2)
