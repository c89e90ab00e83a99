"""Layouts with the same settings for all weights of a model: GPTQ, AWQ, bitsandbytes' LLM.int8, Transformers' float8.

| | codes | scales | beside them |
|---|---|---|---|
| GPTQ | `qweight` int32 `[K * bits / 32, N]` | `scales` `[G, N]` | `qzeros` int32 `[G, N * bits / 32]`, `g_idx` `[K]` |
| AWQ's `gemm` | `qweight` int32 `[K, N / 8]` | `scales` `[G, N]` | `qzeros` int32 `[G, N / 8]` |
| LLM.int8 | `weight` int8 `[N, K]` | `SCB` float32 `[N]` | `weight_format` uint8, 0 for rows |
| `fp8`, `fbgemm_fp8` | `weight` float8 e4m3 `[N, K]` | one a row, a tensor or a block | |

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
    FLOAT8_SCALES,
    INTEGERS,
    TENSOR_SHAPES,
    WHERE,
    Layout,
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
    integer_weight,
    matrix,
    unpack,
    unsupported,
)
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# GPTQ stores each zero point minus this number, by `checkpoint_format`.
_ZERO_POINT_OFFSETS = {"gptq": 1, "gptq_v2": 0}
# The position of each of eight neighbouring columns in AWQ's word, counted from the lowest bits.
_COLUMN_POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)


class Gptq(Layout):
    """Weights of 4 or 8 bits, packed along K, with a zero point for each group; version 1 stores zero point - 1."""

    leaves = marks = frozenset(("qweight", "qzeros", "scales", "g_idx"))

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        super().__init__(config, metadata)
        _check_alike(config)
        self._bits = integer(config, "bits")
        version = config.get("checkpoint_format", config.get("format", "gptq"))
        if self._bits not in (4, 8):
            raise unsupported(f"{WHERE}: bits", "4 or 8", f"{self._bits}")
        if not isinstance(version, str) or version not in _ZERO_POINT_OFFSETS:
            raise unsupported(f"{WHERE}: checkpoint_format", "gptq or gptq_v2", repr(version))
        self._zero_point_offset, self._group_size = _ZERO_POINT_OFFSETS[version], integer(config, "group_size")

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module."""
        name, bits = f"{module}.weight", self._bits
        words, N = matrix(module, tensors, "qweight", torch.int32)
        K = words * 32 // bits
        check_groups(name, K, self._group_size)
        G = group_count(K, self._group_size)
        check_tensor(module, tensors, "scales", FLOAT_DTYPES, (G, N))
        check_tensor(module, tensors, "qzeros", (torch.int32,), (G, -(-N * bits // 32)))
        # desc_act scatters the columns of a group, and only g_idx says where they are.
        check_tensor(module, tensors, "g_idx", INTEGERS, (K,), required=bool(self.config.get("desc_act")))
        codes = unpack(tensors["qweight"].t(), bits)
        zero = unpack(tensors["qzeros"], bits)[:, :N].t()
        if self._zero_point_offset and bool((zero == 2 ** (bits - 1) - 1).any()):
            ambiguous = "the largest number, which lacks one: 0, or 2^bits"
            raise unsupported(name, "zero points that readers agree on", ambiguous)
        if "g_idx" in tensors:
            check_groups_in_order(name, tensors["g_idx"], K, G)
        return asymmetric_weight(name, codes, tensors["scales"].t(), zero + self._zero_point_offset, bits)


class Awq(Layout):
    """Weights of 4 bits, packed along N in the order that AWQ's kernel reads, with a zero point for each group."""

    leaves = marks = frozenset(("qweight", "qzeros", "scales"))

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        super().__init__(config, metadata)
        _check_alike(config)
        bits = integer(config, "bits")
        if bits != 4:
            raise unsupported(f"{WHERE}: bits", "4", f"{bits}")
        self._group_size = integer(config, "group_size")
        version = str(config.get("version", config.get("format", "gemm"))).lower()
        if version != "gemm":
            raise unsupported(f"{WHERE}: version", "gemm", repr(version))

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module."""
        K, words = matrix(module, tensors, "qweight", torch.int32)
        check_groups(f"{module}.weight", K, self._group_size)
        G = group_count(K, self._group_size)
        check_tensor(module, tensors, "scales", FLOAT_DTYPES, (G, words * CODES_PER_WORD))
        check_tensor(module, tensors, "qzeros", (torch.int32,), (G, words))
        codes, zero = (_columns(tensors[leaf]).t() for leaf in ("qweight", "qzeros"))
        return asymmetric_weight(f"{module}.weight", codes, tensors["scales"].t(), zero, bits=4)


def _check_alike(config: Mapping[str, Any]) -> None:
    """Check that GPTQModel's rules in `dynamic` change neither bits nor group size of a weight; else UnsupportedError.

    A rule that begins with `-:` leaves weights in float.
    """
    rules = config.get("dynamic")
    for selector, changed in rules.items() if isinstance(rules, Mapping) else ():
        sizes = [key for key in ("bits", "group_size") if isinstance(changed, Mapping) and key in changed]
        if any(changed[key] != config.get(key) for key in sizes) and not selector.startswith("-:"):
            raise unsupported(
                f"{WHERE}: dynamic", "weights of one size of codes and groups", f"{selector!r}: {changed}"
            )


def _columns(words: Tensor) -> Tensor:
    """Unpack AWQ's words `[R, N / 8]` to codes `[R, N]` of -8 to 7."""
    return unpack_int4(words).unflatten(-1, (-1, CODES_PER_WORD))[..., _COLUMN_POSITIONS].flatten(-2)


class BitsAndBytes(Layout):
    """int8 weights with the values code * SCB / 127. `weight_format` is 0 for rows; the first files do not have it.

    The codes of nf4 and fp4 are not evenly spaced, so no format of this package holds them.
    """

    leaves = frozenset(("weight", "SCB", "weight_format"))
    marks = frozenset(("SCB", "weight_format"))

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        super().__init__(config, metadata)
        if not config.get("load_in_8bit", config.get("_load_in_8bit")):
            kind = f"{config.get('bnb_4bit_quant_type', '4 bits')}, whose codes are not evenly spaced"
            raise unsupported(f"{WHERE}: load_in_4bit", "int8 (load_in_8bit)", kind)

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module; its scale is SCB / 127, rounded to float32."""
        N, _ = matrix(module, tensors, "weight", torch.int8)
        check_tensor(module, tensors, "SCB", FLOAT_DTYPES, (N,))
        check_tensor(module, tensors, "weight_format", INTEGERS, (), (1,), required=False)
        order = tensors.get("weight_format")
        if order is not None and bool(order.any()):
            raise unsupported(f"{module}.weight_format", "0, rows", f"{order.tolist()}")
        return integer_weight(f"{module}.weight", tensors["weight"], tensors["SCB"].float() / 127, bits=8)


class Float8(Layout):
    """float8 e4m3 weights. If each block has a scale, the scales along a row must be equal, as when a block spans K."""

    leaves = frozenset(
        ("weight", "weight_scale", "weight_scale_inv", "activation_scale", "input_scale", "input_scale_ub")
    )
    marks = frozenset(("weight_scale", "weight_scale_inv"))

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        super().__init__(config, metadata)
        self._block = block_size(config, "weight_block_size")
        self._scale_per_row = config.get("quant_method") == "fbgemm_fp8"

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module. Scales of its activations are ignored."""
        N, K = matrix(module, tensors, "weight", torch.float8_e4m3fn)
        # Codes are multiplied by `weight_scale_inv`, despite its name.
        has_plain_scale = self._scale_per_row or ("weight_scale" in tensors and "weight_scale_inv" not in tensors)
        scale_name = "weight_scale" if has_plain_scale else "weight_scale_inv"
        shapes = channel_shapes(N) if self._scale_per_row else (*TENSOR_SHAPES, *channel_shapes(N))
        if self._block is not None:
            shapes = (block_shape(N, K, self._block),)
        check_tensor(module, tensors, scale_name, FLOAT8_SCALES, *shapes)
        rows_per_block = self._block[0] if self._block else 1
        return float8_weight(f"{module}.weight", tensors["weight"], tensors[scale_name], rows_per_block)
