"""AWQ, as AutoAWQ's `gemm` writes it: words packed along N, in the order that its kernel reads.

`qweight` int32 `[K, N / 8]`, `scales` float16 `[G, N]`, `qzeros` int32 `[G, N / 8]`. Source:
https://github.com/casper-hansen/AutoAWQ
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hf_trainweights.formats.packing import CODES_PER_WORD, unpack_int4
from hf_trainweights.imports.asymmetric import asymmetric_weight
from hf_trainweights.imports.layouts.base import WHERE, Layout, integer, no_place
from hf_trainweights.imports.weights import check_groups, check_words, required
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# In which of a word's eight places, from the lowest, each of its columns lies.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class Awq(Layout):
    """Weights of 4 bits, with a zero point for each group."""

    leaves = frozenset(("qweight", "qzeros", "scales"))

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        super().__init__(config, metadata)
        bits = integer(config, "bits")
        if bits != 4:
            raise no_place(f"{WHERE}: bits", "4", f"{bits}")
        self._group_size = integer(config, "group_size")
        version = str(config.get("version", config.get("format", "gemm"))).lower()
        if version != "gemm":
            raise no_place(f"{WHERE}: version", "gemm", repr(version))

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor | None:
        """Return the weight of a module.

        Args:
            module: Its full name, for errors.
            tensors: Its tensors.

        Raises:
            CorruptFileError: A tensor is missing, or one does not fit the others.
        """
        if "qweight" not in tensors:
            return None
        name = f"{module}.weight"
        words, zeros, scales = required(module, tensors, "qweight", "qzeros", "scales")
        check_words(f"{module}.qweight", words)
        codes, scale = _columns(words).t(), scales.mT if scales.dim() == 2 else scales
        check_groups(name, scale, codes.shape[1], self._group_size)
        check_words(f"{module}.qzeros", zeros, (scale.shape[1], words.shape[1]))
        return asymmetric_weight(name, codes, scale, _columns(zeros).t(), bits=4)


def _columns(words: Tensor) -> Tensor:
    """Return words `[R, N / 8]` as codes `[R, N]` of -8 to 7."""
    return unpack_int4(words).unflatten(-1, (-1, CODES_PER_WORD))[..., _PLACES].flatten(-2)
