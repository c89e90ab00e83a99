"""AWQ's `gemm` layout: codes of 4 bits packed along N in the order that AWQ's kernel reads.

| tensor | shape | dtype |
|---|---|---|
| `qweight` | `[K, N / 8]` | int32 |
| `qzeros` | `[G, N / 8]` | int32 |
| `scales` | `[G, N]` | float16, or another float |

`weight = (code - zero) * scale`, in the dtype of the scales. Source: https://github.com/casper-hansen/AutoAWQ
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.packing import CODES_PER_WORD
from hf_trainweights.imports.layouts.base import WHERE, Layout, check_tensor, matrix, unsupported
from hf_trainweights.imports.layouts.codes import unpack_stream
from hf_trainweights.imports.layouts.gptq import Sizes
from hf_trainweights.imports.layouts.weights import integer_weight
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# The position of each of eight neighbouring columns in AWQ's word, counted from the lowest bits.
_COLUMN_POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)


class Awq(Layout):
    """Weights of 4 bits with a zero point for each group."""

    leaves = marks = frozenset(("qweight", "qzeros", "scales"))

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        super().__init__(config, metadata)
        self._sizes = Sizes(config)
        if self._sizes.bits != {4}:
            raise unsupported(f"{WHERE}: bits", "4", ", ".join(map(str, sorted(self._sizes.bits))))
        version = str(config.get("version", config.get("format", "gemm"))).lower()
        if version != "gemm":
            raise unsupported(f"{WHERE}: version", "gemm", repr(version))

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module."""
        if tensors.keys() == {"scales"}:
            raise unsupported(f"{module}.scales", "weights that are used as they are", "scales of an activation")
        K, words = matrix(module, tensors, "qweight", torch.int32)
        groups = self._sizes.groups(f"{module}.weight", K)
        check_tensor(module, tensors, "scales", FLOAT_DTYPES, *((G, words * CODES_PER_WORD) for G in groups))
        check_tensor(module, tensors, "qzeros", (torch.int32,), (len(tensors["scales"]), words))
        codes, zero = (_columns(tensors[leaf]).t() for leaf in ("qweight", "qzeros"))
        return integer_weight(f"{module}.weight", codes.contiguous(), tensors["scales"].t(), 4, zero)


def _columns(words: Tensor) -> Tensor:
    """Unpack AWQ's words `[R, N / 8]` to codes `[R, N]`."""
    return unpack_stream(words, 4).unflatten(-1, (-1, CODES_PER_WORD))[..., _COLUMN_POSITIONS].flatten(-2)
