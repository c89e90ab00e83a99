"""compressed-tensors, as llm-compressor writes it and vLLM reads it: packed integers, plain integers, float8.

Layout: https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.packing import unpack_int4
from hf_trainweights.imports.layouts.base import (
    INTEGERS,
    WHERE,
    Layout,
    Part,
    Shape,
    block_size,
    integer,
    matrix,
    no_place,
)
from hf_trainweights.imports.weights import (
    AGAIN,
    FLOAT8_SCALES,
    TENSOR_SHAPES,
    asymmetric_weight,
    block_shape,
    channel_shapes,
    check_groups,
    check_groups_in_order,
    float8_weight,
    group_count,
)
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

_CODES_PER_WORD = {4: 8, 8: 4}
_HELD = {("int", 4), ("int", 8), ("float", 8)}
# Which columns share a scale; None is what older files have, and one for a row or for the whole weight.
_STRATEGIES = (None, "tensor", "channel", "group", "block")
_FLOAT8_ZEROS = (*INTEGERS, *FLOAT8_SCALES, torch.float8_e4m3fn)


@dataclass(frozen=True)
class _Scheme:
    """How config.json says that weights are quantized."""

    kind: str
    bits: int
    strategy: str | None
    group_size: int
    block: tuple[int, int] | None
    symmetric: bool
    by_activations: bool

    def scale_shapes(self, N: int, K: int) -> tuple[Shape, ...]:
        """Return the shapes that the scale of a weight of N rows and K columns may have."""
        if self.block is not None:
            return (block_shape(N, K, self.block),)
        if self.strategy == "group":
            return ((N, group_count(K, self.group_size)),)
        shapes = {"tensor": TENSOR_SHAPES, "channel": channel_shapes(N)}
        return shapes.get(self.strategy or "", (*TENSOR_SHAPES, *channel_shapes(N)))


class CompressedTensors(Layout):
    """`pack-quantized`, `int-quantized`, `naive-quantized` and `float-quantized` weights."""

    marks = frozenset(("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"))
    leaves = marks | {"weight", "input_scale", "input_zero_point", "output_scale", "output_zero_point"}

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        super().__init__(config, metadata)
        outer, where = config.get("config_groups"), f"{WHERE}: config_groups"
        if not isinstance(outer, Mapping) or not all(isinstance(group, Mapping) for group in outer.values()):
            raise ConfigError(where, "a table of tables", repr(outer)[:200], "Download config.json again.")
        groups = [(f"{WHERE}: {name}", group.get("weights")) for name, group in outer.items()]
        self._schemes = [_scheme(where, weights) for where, weights in groups if isinstance(weights, Mapping)]
        sparsity = config.get("sparsity_config") or {}
        for key, value in (("transform_config", config.get("transform_config")), ("sparsity_config", sparsity)):
            dense = isinstance(value, Mapping) and value.get("format", "dense") == "dense" and key == "sparsity_config"
            if value and not dense:
                raise no_place(f"{WHERE}: {key}", "weights that are used as they are", repr(value)[:200])

    def parts(self, module: str, tensors: Mapping[str, Tensor]) -> dict[str, Part]:
        """Return what the tensors of a quantized weight have to be."""
        weight = tensors.get("weight")
        if weight is not None and weight.dtype in FLOAT_DTYPES:
            raise no_place(f"{module}.weight", "compressed codes", f"{weight.dtype}: quantized, but never compressed")
        packed = bool({"weight_packed", "weight_shape"} & tensors.keys())
        N, K, schemes = self._packed(module, tensors) if packed else self._plain(module, tensors)
        is_float = schemes[0].kind == "float"
        shapes = tuple(dict.fromkeys(shape for scheme in schemes for shape in scheme.scale_shapes(N, K)))
        scale = Part(FLOAT8_SCALES if is_float else FLOAT_DTYPES, shapes)
        scale.check(f"{module}.weight_scale", tensors.get("weight_scale"))
        # Which group of config.json a module belongs to is told by its tensors.
        found = tuple(tensors["weight_scale"].shape)
        schemes = [scheme for scheme in schemes if found in scheme.scale_shapes(N, K)]
        for scheme in schemes if not is_float else ():
            check_groups(f"{module}.weight", K, scheme.block[1] if scheme.block else scheme.group_size)
        has_zeros = any(not scheme.symmetric for scheme in schemes)
        zeros, held = found, tensors.get("weight_zero_point")
        if packed and len(found) == 2 and held is not None and held.dtype is torch.int32:
            zeros = (-(-N // _CODES_PER_WORD[schemes[0].bits]), found[1])  # packed like the codes, but along the rows
        by_activations = any(scheme.by_activations for scheme in schemes)
        return {
            **({} if packed else {"weight": Part((torch.int8, torch.float8_e4m3fn), ((N, K),))}),
            "weight_scale": scale,
            "weight_zero_point": Part(_FLOAT8_ZEROS if is_float else INTEGERS, (zeros,), has_zeros),
            "weight_g_idx": Part(INTEGERS, ((K,),), by_activations),
        }

    def _plain(self, module: str, tensors: Mapping[str, Tensor]) -> tuple[int, int, list[_Scheme]]:
        """Return rows, columns and the schemes that codes of 8 bits may have."""
        N, K = matrix(module, tensors, "weight", torch.int8, torch.float8_e4m3fn)
        kind = "int" if tensors["weight"].dtype is torch.int8 else "float"
        fitting = [scheme for scheme in self._schemes if scheme.kind == kind]
        if not fitting:
            expected = f"codes of a scheme in config.json ({self._described()})"
            raise CorruptFileError(f"{module}.weight", expected, f"{tensors['weight'].dtype}", AGAIN)
        return N, K, fitting

    def _packed(self, module: str, tensors: Mapping[str, Tensor]) -> tuple[int, int, list[_Scheme]]:
        """Return rows, columns and the schemes that int32 words may have, which are of one number of bits."""
        rows, words = matrix(module, tensors, "weight_packed", torch.int32)
        shape = Part((torch.int64, torch.int32), ((2,),))
        shape.check(f"{module}.weight_shape", tensors.get("weight_shape"))
        N, K = tensors["weight_shape"].tolist()
        fitting = [
            scheme
            for scheme in self._schemes
            if scheme.kind == "int" and (rows, words) == (N, -(-K // _CODES_PER_WORD[scheme.bits])) and K > 0
        ]
        if len({scheme.bits for scheme in fitting}) != 1:
            expected = f"words of shape {(N, K)} by a scheme in config.json ({self._described()})"
            raise CorruptFileError(f"{module}.weight_packed", expected, f"shape {(rows, words)}", AGAIN)
        return N, K, fitting

    def _described(self) -> str:
        return ", ".join(sorted({f"{scheme.kind}{scheme.bits}" for scheme in self._schemes})) or "none"

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module; settings for its activations are left out."""
        name, scale, codes = f"{module}.weight", tensors["weight_scale"], tensors.get("weight")
        zero, bits = tensors.get("weight_zero_point"), 8
        if codes is not None and codes.dtype == torch.float8_e4m3fn:
            if zero is not None and bool(zero.double().any()):
                raise no_place(name, "float8 without zero points", "zero points other than 0")
            rows = next((scheme.block[0] for scheme in self._schemes if scheme.block is not None), 1)
            return float8_weight(name, codes, scale, rows)
        if codes is None:
            _, K, schemes = self._packed(module, tensors)
            bits = schemes[0].bits
            codes = unpack(tensors["weight_packed"], bits)[:, :K]
            if zero is not None and zero.dtype is torch.int32 and scale.dim() == 2:
                zero = unpack(zero.t(), bits).t()[: len(codes)]
        order = tensors.get("weight_g_idx")
        if order is not None and not bool((order == -1).all()):
            check_groups_in_order(name, order, codes.shape[1], scale.shape[-1])
        return asymmetric_weight(name, codes, scale, zero, bits)


def _scheme(where: str, weights: Mapping[str, Any]) -> _Scheme:
    """Return what one group of config.json says of its weights."""
    bits, kind = integer(weights, "num_bits", where), weights.get("type", "int")
    if not isinstance(kind, str) or (kind, bits) not in _HELD:
        raise no_place(where, "int4, int8 or float8 weights", f"{kind} of {bits} bits")
    strategy = weights.get("strategy")
    if strategy not in _STRATEGIES:
        raise no_place(where, "scales of tensors, channels, groups or blocks", f"strategy {strategy!r}")
    if strategy is None and weights.get("group_size") not in (None, -1):
        strategy = "group"
    size = integer(weights, "group_size", where) if strategy == "group" else -1
    block = block_size(weights, "block_structure", where) if strategy in (None, "block") else None
    symmetric = weights.get("symmetric", True) is not False
    return _Scheme(kind, bits, strategy, size, block, symmetric, weights.get("actorder") in ("group", "dynamic"))


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return the int8 codes of int32 words, the first one in the lowest bits, each stored as code + 2^(bits - 1).

    Examples:
        >>> unpack(torch.tensor([[0x7F800081]], dtype=torch.int32), 8).tolist()
        [[1, -128, 0, -1]]
    """
    return unpack_int4(words) if bits == 4 else (words.contiguous().view(torch.uint8) ^ 128).view(torch.int8)
