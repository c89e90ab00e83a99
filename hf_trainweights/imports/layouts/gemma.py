"""Gemma's own: symmetric integers of 2, 4 or 8 bits with a scale for each row, as Transformers' `gemma` reads them.

| tensor | shape | dtype |
|---|---|---|
| `weight`, or `embedding_quantized` of an embedding: codes | `[N, ceil(K * bits / 8)]` | uint8, int8 for 8 bits |
| `weight_scale`, or `embedding_scale` | `[N, 1]`, for an embedding `[N, G]` | float32 |

Codes of less than 8 bits are stored plus half their range, the first column in the lowest bits. The weight is
`code * scale`. Scales of activations are left out. Source: Transformers' integrations/gemma_quant.py
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.imports.layouts.base import AGAIN, Layout, check_groups, check_tensor, matrix, unsupported
from hf_trainweights.imports.layouts.codes import unpack_stream
from hf_trainweights.imports.layouts.weights import integer_weight, unsigned
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

_ACTIVATIONS = ("input_activation_scale", "output_activation_scale")


class Gemma(Layout):
    """Weights of linear layers and of embeddings."""

    marks = frozenset(("weight_scale", "embedding_quantized", "embedding_scale"))
    leaves = marks | {"weight", *_ACTIVATIONS}

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module."""
        is_embedding = "embedding_quantized" in tensors
        leaf, scale = ("embedding_quantized", "embedding_scale") if is_embedding else ("weight", "weight_scale")
        name = f"{module}.weight"
        N, columns = matrix(module, tensors, leaf, torch.uint8, torch.int8)
        codes, bits = tensors[leaf], 8
        if codes.dtype is torch.uint8:
            _, K = self.shapes.get(module, (N, 2 * columns))
            bits = 8 * columns // K
            if bits not in (2, 4) or bits * K != 8 * columns:
                expected = f"codes of 2 or 4 bits for {K} columns that fill their bytes"
                raise CorruptFileError(f"{module}.{leaf}", expected, f"{columns} bytes a row", AGAIN)
            codes = unpack_stream(codes, bits)
        else:
            codes = unsigned(name, codes, 128)
        check_tensor(module, tensors, scale, FLOAT_DTYPES, (N, None) if is_embedding else (N, 1))
        G, K = tensors[scale].shape[1], codes.shape[1]
        if K % G:
            raise unsupported(name, f"a number of groups that divides {K} columns", f"{G}")
        check_groups(name, K, K // G)
        return integer_weight(name, codes, tensors[scale], bits)
