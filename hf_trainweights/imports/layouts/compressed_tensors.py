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
from hf_trainweights.imports.layouts.base import (
    AGAIN,
    CONFIG_AGAIN,
    FLOAT8_SCALES,
    INTEGERS,
    TENSOR_SHAPES,
    WHERE,
    Layout,
    Shape,
    asymmetric_weight,
    block_shape,
    block_size,
    channel_shapes,
    check_groups,
    check_groups_in_order,
    check_tensor,
    float8_weight,
    group_count,
    integer,
    matrix,
    unpack,
    unsupported,
)
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

_CODES_PER_WORD = {4: 8, 8: 4}
_SUPPORTED = {("int", 4), ("int", 8), ("float", 8)}
# The names of the ways in which elements share scales. Older files have none: a row or the weight then has one scale.
_STRATEGIES = (None, "tensor", "channel", "group", "block")
_FLOAT8_ZEROS = (*INTEGERS, *FLOAT8_SCALES, torch.float8_e4m3fn)


@dataclass(frozen=True)
class _Scheme:
    """The quantization of the weights in one group of config.json."""

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
            raise ConfigError(where, "a table of tables", repr(outer)[:200], CONFIG_AGAIN)
        groups = [(f"{WHERE}: {name}", group.get("weights")) for name, group in outer.items()]
        self._schemes = [_scheme(where, weights) for where, weights in groups if isinstance(weights, Mapping)]
        sparsity = config.get("sparsity_config") or {}
        for key, value in (("transform_config", config.get("transform_config")), ("sparsity_config", sparsity)):
            dense = isinstance(value, Mapping) and value.get("format", "dense") == "dense" and key == "sparsity_config"
            if value and not dense:
                raise unsupported(f"{WHERE}: {key}", "weights that are used as they are", repr(value)[:200])

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module. Settings for its activations are ignored."""
        name, plain = f"{module}.weight", tensors.get("weight")
        if plain is not None and plain.dtype in FLOAT_DTYPES:
            raise unsupported(name, "compressed codes", f"{plain.dtype}: quantized, but never compressed")
        packed = bool({"weight_packed", "weight_shape"} & tensors.keys())
        N, K, schemes = self._packed(module, tensors) if packed else self._plain(module, tensors)
        _check_scales(module, tensors, N, K, schemes)
        scale, zero = tensors["weight_scale"], tensors.get("weight_zero_point")
        if schemes[0].kind == "float":
            if zero is not None and bool(zero.double().any()):
                raise unsupported(name, "float8 without zero points", "zero points other than 0")
            rows = next((scheme.block[0] for scheme in self._schemes if scheme.block is not None), 1)
            return float8_weight(name, tensors["weight"], scale, rows)
        bits = schemes[0].bits if packed else 8
        codes = unpack(tensors["weight_packed"], bits)[:, :K] if packed else tensors["weight"]
        if zero is not None and _has_packed_zeros(tensors):
            zero = unpack(zero.t(), bits).t()[:N]
        order = tensors.get("weight_g_idx")
        if order is not None and not bool((order == -1).all()):
            check_groups_in_order(name, order, K, scale.shape[-1])
        return asymmetric_weight(name, codes, scale, zero, bits)

    def _plain(self, module: str, tensors: Mapping[str, Tensor]) -> tuple[int, int, list[_Scheme]]:
        """Check unpacked codes of 8 bits, and return their rows, their columns and the schemes that fit them."""
        N, K = matrix(module, tensors, "weight", torch.int8, torch.float8_e4m3fn)
        kind = "int" if tensors["weight"].dtype is torch.int8 else "float"
        fitting = [scheme for scheme in self._schemes if scheme.kind == kind]
        if not fitting:
            expected = f"codes of a scheme in config.json ({self._described()})"
            raise CorruptFileError(f"{module}.weight", expected, f"{tensors['weight'].dtype}", AGAIN)
        return N, K, fitting

    def _packed(self, module: str, tensors: Mapping[str, Tensor]) -> tuple[int, int, list[_Scheme]]:
        """Check int32 words of codes, and return rows, columns and the schemes that fit, which have the same bits."""
        rows, words = matrix(module, tensors, "weight_packed", torch.int32)
        check_tensor(module, tensors, "weight_shape", (torch.int64, torch.int32), (2,))
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


def _check_scales(module: str, tensors: Mapping[str, Tensor], N: int, K: int, schemes: list[_Scheme]) -> None:
    """Check the tensors beside the codes of a weight of N rows and K columns, to which several schemes may fit."""
    is_float = schemes[0].kind == "float"
    shapes = dict.fromkeys(shape for scheme in schemes for shape in scheme.scale_shapes(N, K))
    check_tensor(module, tensors, "weight_scale", FLOAT8_SCALES if is_float else FLOAT_DTYPES, *shapes)
    # The group of config.json that a module belongs to is recognized by the shape of its scale.
    scale_shape = tuple(tensors["weight_scale"].shape)
    schemes = [scheme for scheme in schemes if scale_shape in scheme.scale_shapes(N, K)]
    for scheme in schemes if not is_float else ():
        check_groups(f"{module}.weight", K, scheme.block[1] if scheme.block else scheme.group_size)
    zeros_shape = scale_shape
    if _has_packed_zeros(tensors):
        zeros_shape = (-(-N // _CODES_PER_WORD[schemes[0].bits]), scale_shape[1])
    has_zeros = any(not scheme.symmetric for scheme in schemes)
    dtypes = _FLOAT8_ZEROS if is_float else INTEGERS
    check_tensor(module, tensors, "weight_zero_point", dtypes, zeros_shape, required=has_zeros)
    by_activations = any(scheme.by_activations for scheme in schemes)
    check_tensor(module, tensors, "weight_g_idx", INTEGERS, (K,), required=by_activations)


def _has_packed_zeros(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether the zero points are packed into words like the codes, but along the rows."""
    zero = tensors.get("weight_zero_point")
    are_words = zero is not None and zero.dtype is torch.int32
    return "weight_packed" in tensors and are_words and tensors["weight_scale"].dim() == 2


def _scheme(where: str, weights: Mapping[str, Any]) -> _Scheme:
    """Read the quantization of the weights from one group of config.json."""
    bits, kind = integer(weights, "num_bits", where), weights.get("type", "int")
    if not isinstance(kind, str) or (kind, bits) not in _SUPPORTED:
        raise unsupported(where, "int4, int8 or float8 weights", f"{kind} of {bits} bits")
    strategy = weights.get("strategy")
    if strategy not in _STRATEGIES:
        raise unsupported(where, "scales of tensors, channels, groups or blocks", f"strategy {strategy!r}")
    if strategy is None and weights.get("group_size") not in (None, -1):
        strategy = "group"
    size = integer(weights, "group_size", where) if strategy == "group" else -1
    block = block_size(weights, "block_structure", where) if strategy in (None, "block") else None
    symmetric = weights.get("symmetric", True) is not False
    return _Scheme(kind, bits, strategy, size, block, symmetric, weights.get("actorder") in ("group", "dynamic"))
