"""compressed-tensors, as llm-compressor writes it and vLLM reads it: packed integers, plain integers, float8, float4.

| codes | shape, dtype | `weight_scale` | beside them |
|---|---|---|---|
| packed integers of 2 to 8 bits | `weight_packed`: int32 words, one stream along K | float | `weight_shape` `[2]` |
| plain integers, float8 | `weight` `[N, K]`: int8, float8_e4m3fn | float; exponents of MXFP8 | |
| NVFP4 | `weight_packed` uint8 `[N, K / 2]`, even columns low | float8 `[N, K / 16]` | `weight_global_scale` |
| MXFP4 | as NVFP4 | uint8 exponents `[N, K / 32]` | |

Integers may have `weight_zero_point`, packed along N if the codes are, and `weight_g_idx`. The scales of NVFP4 are
divided by the global scale, rounded to float32. Layout: https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

import re
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
    EXPONENTS,
    FLOAT8_SCALES,
    INTEGERS,
    TENSOR_SHAPES,
    WHERE,
    Layout,
    Shape,
    block_shape,
    block_size,
    channel_shapes,
    check_groups,
    check_tensor,
    group_count,
    integer,
    matrix,
    unsupported,
)
from hf_trainweights.imports.layouts.codes import unpack_stream
from hf_trainweights.imports.layouts.weights import (
    exponents,
    float8_weight,
    integer_weight,
    ordered_weight,
    table_weight,
    unsigned,
)
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

_BITS = {"int": (2, 3, 4, 5, 6, 8), "float": (4, 8)}
# The names of the ways in which elements share scales. Older files have none: a row or the weight then has one scale.
_STRATEGIES = (None, "tensor", "channel", "group", "tensor_group", "block")
# Older files have the sizes of a block as text.
_BLOCK_TEXT = re.compile(r"[0-9]{1,6}x[0-9]{1,6}")
_GROUP_STRATEGIES = ("group", "tensor_group")
# NVFP4 and MXFP4 have groups of one size each.
_NVFP4_GROUP_SIZE, _MXFP4_GROUP_SIZE = 16, 32
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
        if self.strategy in _GROUP_STRATEGIES:
            return ((N, group_count(K, self.group_size)),)
        shapes = {"tensor": TENSOR_SHAPES, "channel": channel_shapes(N)}
        return shapes.get(self.strategy or "", (*TENSOR_SHAPES, *channel_shapes(N)))


class CompressedTensors(Layout):
    """Packed, plain and float weights. Settings for activations are ignored."""

    marks = frozenset(
        ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale")
    )
    leaves = marks | frozenset(
        ("weight", "input_scale", "input_zero_point", "output_scale", "output_zero_point", "input_global_scale")
    )

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
        """Return the weight of a module."""
        name, plain, packed = f"{module}.weight", tensors.get("weight"), tensors.get("weight_packed")
        if plain is not None and plain.dtype in FLOAT_DTYPES:
            raise unsupported(name, "compressed codes", f"{plain.dtype}: quantized, but never compressed")
        if packed is not None and packed.dtype is torch.uint8:
            return self._float4(module, tensors)
        is_packed = packed is not None or "weight_shape" in tensors
        N, K, schemes = self._packed(module, tensors) if is_packed else self._plain(module, tensors)
        scheme = _check_scales(module, tensors, N, K, schemes)
        scale, zero = tensors["weight_scale"], tensors.get("weight_zero_point")
        if scheme.kind == "float":
            if zero is not None and bool(zero.double().any()):
                raise unsupported(name, "float8 without zero points", "zero points other than 0")
            block = (1, scheme.group_size) if scheme.strategy in _GROUP_STRATEGIES else scheme.block or (1, K)
            return float8_weight(name, tensors["weight"], scale, block)
        bits, order = scheme.bits, tensors.get("weight_g_idx")
        middle = 2 ** (bits - 1)
        if is_packed:
            codes = unpack_stream(tensors["weight_packed"], bits)[:, :K]
        else:
            codes = unsigned(name, tensors["weight"], middle)
        if zero is not None and _has_packed_zeros(tensors):
            zero = unpack_stream(zero.t(), bits).t()[:N]
        elif zero is not None:
            zero = zero.to(torch.int32) + middle
        if order is not None and not bool((order == -1).all()):
            return ordered_weight(name, codes, scale, bits, zero, order)
        return integer_weight(name, codes, scale, bits, zero)

    def _float4(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return a weight of NVFP4 or MXFP4, of which the dtype of the scales tells."""
        name = f"{module}.weight"
        N, half = matrix(module, tensors, "weight_packed", torch.uint8)
        if not any((scheme.kind, scheme.bits) == ("float", 4) for scheme in self._schemes):
            expected = f"words of a scheme in config.json ({self._described()})"
            raise CorruptFileError(f"{module}.weight_packed", expected, f"bytes of shape {(N, half)}", AGAIN)
        zero, scale = tensors.get("weight_zero_point"), tensors.get("weight_scale")
        if zero is not None and bool(zero.double().any()):
            raise unsupported(name, "float4 without zero points", "zero points other than 0")
        if scale is not None and scale.dtype in EXPONENTS and "weight_global_scale" not in tensors:
            check_tensor(module, tensors, "weight_scale", EXPONENTS, (N, 2 * half // _MXFP4_GROUP_SIZE))
            scales = {"scale": exponents(name, scale)}
            return table_weight(name, tensors["weight_packed"], _MXFP4_GROUP_SIZE, "e8m0", scales)
        check_tensor(module, tensors, "weight_scale", (torch.float8_e4m3fn,), (N, 2 * half // _NVFP4_GROUP_SIZE))
        check_tensor(module, tensors, "weight_global_scale", FLOAT_DTYPES, *TENSOR_SHAPES)
        global_scale = tensors["weight_global_scale"].float().view(1, 1).expand(N, 1)
        if not bool(global_scale.all()):
            raise CorruptFileError(f"{module}.weight_global_scale", "a number that divides", "0", AGAIN)
        scales = {"scale": tensors["weight_scale"], "global_scale": global_scale}
        return table_weight(name, tensors["weight_packed"], _NVFP4_GROUP_SIZE, "e4m3_divided", scales)

    def _plain(self, module: str, tensors: Mapping[str, Tensor]) -> tuple[int, int, list[_Scheme]]:
        """Check codes in a byte each, and return their rows, their columns and the schemes that fit them."""
        N, K = matrix(module, tensors, "weight", torch.int8, torch.float8_e4m3fn)
        kind = "int" if tensors["weight"].dtype is torch.int8 else "float"
        fitting = [scheme for scheme in self._schemes if scheme.kind == kind and (kind, scheme.bits) != ("float", 4)]
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
            if scheme.kind == "int" and (rows, words) == (N, -(-K * scheme.bits // 32)) and K > 0
        ]
        if len({scheme.bits for scheme in fitting}) != 1:
            expected = f"words of shape {(N, K)} by a scheme in config.json ({self._described()})"
            raise CorruptFileError(f"{module}.weight_packed", expected, f"shape {(rows, words)}", AGAIN)
        return N, K, fitting

    def _described(self) -> str:
        return ", ".join(sorted({f"{scheme.kind}{scheme.bits}" for scheme in self._schemes})) or "none"


def _check_scales(module: str, tensors: Mapping[str, Tensor], N: int, K: int, schemes: list[_Scheme]) -> _Scheme:
    """Check the tensors beside the codes of a weight of N rows and K columns; return the scheme of them that fits."""
    is_float = schemes[0].kind == "float"
    shapes = dict.fromkeys(shape for scheme in schemes for shape in scheme.scale_shapes(N, K))
    dtypes = (*FLOAT8_SCALES, torch.uint8) if is_float else FLOAT_DTYPES
    check_tensor(module, tensors, "weight_scale", dtypes, *shapes)
    # The group of config.json that a module belongs to is recognized by the shape of its scale.
    scale_shape = tuple(tensors["weight_scale"].shape)
    schemes = [scheme for scheme in schemes if scale_shape in scheme.scale_shapes(N, K)]
    for scheme in schemes if not is_float else ():
        check_groups(f"{module}.weight", K, scheme.block[1] if scheme.block else scheme.group_size)
    zeros_shape = scale_shape
    if _has_packed_zeros(tensors):
        zeros_shape = (-(-N * schemes[0].bits // 32), scale_shape[1])
    has_zeros = any(not scheme.symmetric for scheme in schemes)
    dtypes = _FLOAT8_ZEROS if is_float else INTEGERS
    check_tensor(module, tensors, "weight_zero_point", dtypes, zeros_shape, required=has_zeros)
    by_activations = any(scheme.by_activations for scheme in schemes)
    check_tensor(module, tensors, "weight_g_idx", INTEGERS, (K,), required=by_activations)
    # Codes in a byte each may belong to several schemes. The one of the most bits holds them.
    return max(schemes, key=lambda scheme: scheme.bits)


def _has_packed_zeros(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether the zero points are packed into words like the codes, but along the rows."""
    zero = tensors.get("weight_zero_point")
    are_words = zero is not None and zero.dtype is torch.int32
    return "weight_packed" in tensors and are_words and tensors["weight_scale"].dim() == 2


def _scheme(where: str, weights: Mapping[str, Any]) -> _Scheme:
    """Read the quantization of the weights from one group of config.json."""
    bits, kind = integer(weights, "num_bits", where), weights.get("type", "int")
    if not isinstance(kind, str) or bits not in _BITS.get(kind, ()):
        raise unsupported(where, "integers of 2 to 6 or 8 bits, float8 or float4", f"{kind} of {bits} bits")
    strategy = weights.get("strategy")
    if strategy not in _STRATEGIES:
        raise unsupported(where, "scales of tensors, channels, groups or blocks", f"strategy {strategy!r}")
    if strategy is None and weights.get("group_size") not in (None, -1):
        strategy = "group"
    size = integer(weights, "group_size", where) if strategy in _GROUP_STRATEGIES else -1
    structure = weights.get("block_structure")
    if isinstance(structure, str) and _BLOCK_TEXT.fullmatch(structure):
        weights = {**weights, "block_structure": [int(size) for size in structure.split("x")]}
    block = block_size(weights, "block_structure", where) if strategy in (None, "block") else None
    symmetric = weights.get("symmetric", True) is not False
    return _Scheme(kind, bits, strategy, size, block, symmetric, weights.get("actorder") in ("group", "dynamic"))
