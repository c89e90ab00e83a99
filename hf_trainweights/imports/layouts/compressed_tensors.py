"""compressed-tensors, as llm-compressor writes it and vLLM reads it: packed integers, plain integers, float8.

Layout: https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.packing import unpack_int4
from hf_trainweights.imports.asymmetric import asymmetric_weight
from hf_trainweights.imports.layouts.base import WHERE, Layout, integer, no_place, tables
from hf_trainweights.imports.weights import (
    AGAIN,
    check_groups_in_order,
    float8_weight,
    required,
)
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

_CODES_PER_WORD = {4: 8, 8: 4}
_HELD = {("int", 4), ("int", 8), ("float", 8)}


class CompressedTensors(Layout):
    """`pack-quantized`, `int-quantized`, `naive-quantized` and `float-quantized` weights."""

    leaves = frozenset(
        (
            *("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
            *("input_scale", "input_zero_point", "output_scale", "output_zero_point"),
        )
    )

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        super().__init__(config, metadata)
        self._bits: set[int] = set()
        self._group_sizes: set[int] = set()
        self._block_rows = 1
        for group, scheme in tables(config, "config_groups"):
            self._add(f"{WHERE}: {group}", scheme.get("weights"))
        sparsity = config.get("sparsity_config") or {}
        for key, value in (("transform_config", config.get("transform_config")), ("sparsity_config", sparsity)):
            dense = isinstance(value, Mapping) and value.get("format", "dense") == "dense" and key == "sparsity_config"
            if value and not dense:
                raise no_place(f"{WHERE}: {key}", "weights that are used as they are", repr(value)[:200])

    def _add(self, where: str, weights: object) -> None:
        if not isinstance(weights, Mapping):
            return
        bits, kind = integer(weights, "num_bits", where), weights.get("type", "int")
        if not isinstance(kind, str) or (kind, bits) not in _HELD:
            raise no_place(where, "int4, int8 or float8 weights", f"{kind} of {bits} bits")
        self._bits.add(bits)
        grouped = weights.get("strategy") == "group" or weights.get("group_size") not in (None, -1)
        self._group_sizes.add(integer(weights, "group_size", where) if grouped else -1)
        block = weights.get("block_structure")
        if isinstance(block, list) and block and type(block[0]) is int:
            self._block_rows = max(1, block[0])

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor | None:
        """Return the weight of a module; settings for its activations are left out.

        Args:
            module: Its full name, for errors.
            tensors: Its tensors.

        Raises:
            CorruptFileError: A tensor is missing, or one does not fit the others.
            UnsupportedError: Groups are by activation order, float8 in blocks, a zero point cannot be held, or the
                weight is not compressed.
        """
        name, weight = f"{module}.weight", tensors.get("weight")
        if "weight_packed" not in tensors and "weight_scale" not in tensors:
            return None
        if weight is not None and weight.dtype in FLOAT_DTYPES:
            raise no_place(name, "compressed codes", f"{weight.dtype}: quantized, but never compressed")
        scale = required(module, tensors, "weight_scale")[0]
        if weight is not None and weight.dtype != torch.int8:
            if "weight_zero_point" in tensors and bool(tensors["weight_zero_point"].double().any()):
                raise no_place(name, "float8 without zero points", "zero points other than 0")
            return float8_weight(name, weight, scale, self._block_rows)
        codes, bits = (weight, 8) if weight is not None else self._unpack(module, tensors)
        if "weight_g_idx" in tensors and not bool((tensors["weight_g_idx"] == -1).all()):
            check_groups_in_order(name, tensors["weight_g_idx"], codes.shape[-1], scale.shape[-1])
        K, G = codes.shape[-1], scale.shape[-1] if scale.dim() == 2 else 1
        if G not in {1 if size < 1 else -(-K // size) for size in self._group_sizes}:
            expected = f"groups of {' or '.join(map(str, sorted(self._group_sizes)))} columns, as config.json has it"
            raise CorruptFileError(name, expected, f"{G} scales for {K} columns", AGAIN)
        return asymmetric_weight(name, codes, scale, _zero_point(tensors, len(codes), bits), bits)

    def _unpack(self, module: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        """Return the codes `[N, K]` of int32 words, and their bits."""
        packed, shape = required(module, tensors, "weight_packed", "weight_shape")
        N, K = shape.flatten().tolist() if shape.numel() == 2 and shape.dtype in (torch.int64, torch.int32) else (0, 0)
        fitting = [bits for bits in self._bits if tuple(packed.shape) == (N, -(-K // _CODES_PER_WORD.get(bits, 1)))]
        if packed.dtype != torch.int32 or N < 1 or K < 1 or len(fitting) != 1 or fitting[0] not in _CODES_PER_WORD:
            expected = f"int32 words of {' or '.join(map(str, sorted(self._bits)))}-bit codes of shape {(N, K)}"
            found = f"{packed.dtype} of shape {tuple(packed.shape)}"
            raise CorruptFileError(f"{module}.weight_packed", expected, found, AGAIN)
        return unpack(packed, fitting[0])[:, :K], fitting[0]


def _zero_point(tensors: Mapping[str, Tensor], N: int, bits: int) -> Tensor:
    """Return the zero points; where codes are packed they are too, along the rows."""
    zero = tensors.get("weight_zero_point", torch.zeros(1, dtype=torch.int8))
    packed = "weight_packed" in tensors and zero.dim() == 2 and zero.dtype == torch.int32
    return unpack(zero.t(), bits).t()[:N] if packed else zero


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return the codes of words, the first one in the lowest bits, each stored as code + 2^(bits - 1).

    Args:
        words: Int32 `[N, W]`.
        bits: 4 or 8.

    Returns:
        Int8 `[N, W * 32 / bits]`.

    Examples:
        >>> unpack(torch.tensor([[0x7F800081]], dtype=torch.int32), 8).tolist()
        [[1, -128, 0, -1]]
    """
    return unpack_int4(words) if bits == 4 else (words.contiguous().view(torch.uint8) ^ 128).view(torch.int8)
