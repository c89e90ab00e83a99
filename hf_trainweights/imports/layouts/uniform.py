"""Layouts that describe all weights of a model alike: GPTQ, AWQ, bitsandbytes' LLM.int8, Transformers' own float8.

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
    no_place,
    unpack,
)
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# What GPTQ's stored zero point lacks, by `checkpoint_format`.
_MISSING = {"gptq": 1, "gptq_v2": 0}
# In which of a word's eight places, from the lowest, each of AWQ's columns lies.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class Gptq(Layout):
    """Weights of 4 or 8 bits in words along K, with a zero point for each group; version 1 stores it less one."""

    leaves = marks = frozenset(("qweight", "qzeros", "scales", "g_idx"))

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        super().__init__(config, metadata)
        _check_alike(config)
        self._bits = integer(config, "bits")
        version = config.get("checkpoint_format", config.get("format", "gptq"))
        if self._bits not in (4, 8):
            raise no_place(f"{WHERE}: bits", "4 or 8", f"{self._bits}")
        if not isinstance(version, str) or version not in _MISSING:
            raise no_place(f"{WHERE}: checkpoint_format", "gptq or gptq_v2", repr(version))
        self._missing, self._group_size = _MISSING[version], integer(config, "group_size")

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module."""
        name, bits = f"{module}.weight", self._bits
        words, N = matrix(module, tensors, "qweight", torch.int32)
        K = words * 32 // bits
        check_groups(name, K, self._group_size)
        G = group_count(K, self._group_size)
        check_tensor(module, tensors, "scales", FLOAT_DTYPES, (G, N))
        check_tensor(module, tensors, "qzeros", (torch.int32,), (G, -(-N * bits // 32)))
        # Without it the groups of desc_act are not known.
        check_tensor(module, tensors, "g_idx", INTEGERS, (K,), required=bool(self.config.get("desc_act")))
        codes = unpack(tensors["qweight"].t(), bits)
        zero = unpack(tensors["qzeros"], bits)[:, :N].t()
        if self._missing and bool((zero == 2 ** (bits - 1) - 1).any()):
            found = "the largest number, which lacks one: 0, or 2^bits"
            raise no_place(name, "zero points that readers agree on", found)
        if "g_idx" in tensors:
            check_groups_in_order(name, tensors["g_idx"], K, G)
        return asymmetric_weight(name, codes, tensors["scales"].t(), zero + self._missing, bits)


class Awq(Layout):
    """Weights of 4 bits in words along N, in the order of a kernel, with a zero point for each group."""

    leaves = marks = frozenset(("qweight", "qzeros", "scales"))

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        super().__init__(config, metadata)
        _check_alike(config)
        bits = integer(config, "bits")
        if bits != 4:
            raise no_place(f"{WHERE}: bits", "4", f"{bits}")
        self._group_size = integer(config, "group_size")
        version = str(config.get("version", config.get("format", "gemm"))).lower()
        if version != "gemm":
            raise no_place(f"{WHERE}: version", "gemm", repr(version))

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
    """Check that no rule of GPTQModel's `dynamic` gives some weights other codes or groups; else UnsupportedError.

    A rule that begins with `-:` leaves weights in float.
    """
    rules = config.get("dynamic")
    for selector, changed in rules.items() if isinstance(rules, Mapping) else ():
        sizes = [key for key in ("bits", "group_size") if isinstance(changed, Mapping) and key in changed]
        if any(changed[key] != config.get(key) for key in sizes) and not selector.startswith("-:"):
            raise no_place(f"{WHERE}: dynamic", "weights of one size of codes and groups", f"{selector!r}: {changed}")


def _columns(words: Tensor) -> Tensor:
    """Return AWQ's words `[R, N / 8]` as codes `[R, N]` of -8 to 7."""
    return unpack_int4(words).unflatten(-1, (-1, CODES_PER_WORD))[..., _PLACES].flatten(-2)


class BitsAndBytes(Layout):
    """int8 weights, each code * SCB / 127; `weight_format` is 0 for rows, and is missing in the first files.

    nf4 and fp4 have no evenly spaced codes, so no format of this package holds them.
    """

    leaves = frozenset(("weight", "SCB", "weight_format"))
    marks = frozenset(("SCB", "weight_format"))

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        super().__init__(config, metadata)
        if not config.get("load_in_8bit", config.get("_load_in_8bit")):
            found = f"{config.get('bnb_4bit_quant_type', '4 bits')}, whose codes are not evenly spaced"
            raise no_place(f"{WHERE}: load_in_4bit", "int8 (load_in_8bit)", found)

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module; its scale is SCB / 127, rounded to float32."""
        N, _ = matrix(module, tensors, "weight", torch.int8)
        check_tensor(module, tensors, "SCB", FLOAT_DTYPES, (N,))
        check_tensor(module, tensors, "weight_format", INTEGERS, (), (1,), required=False)
        order = tensors.get("weight_format")
        if order is not None and bool(order.any()):
            raise no_place(f"{module}.weight_format", "0, rows", f"{order.tolist()}")
        return integer_weight(f"{module}.weight", tensors["weight"], tensors["SCB"].float() / 127, bits=8)


class Float8(Layout):
    """float8 e4m3 weights; those in blocks can be held where the scales of a row are equal, as if K is one block."""

    leaves = frozenset(
        ("weight", "weight_scale", "weight_scale_inv", "activation_scale", "input_scale", "input_scale_ub")
    )
    marks = frozenset(("weight_scale", "weight_scale_inv"))

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]):
        super().__init__(config, metadata)
        self._block = block_size(config, "weight_block_size")
        self._of_rows = config.get("quant_method") == "fbgemm_fp8"

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Return the weight of a module; what is known of its activations is left out."""
        N, K = matrix(module, tensors, "weight", torch.float8_e4m3fn)
        # Codes are multiplied by `weight_scale_inv` in spite of its name.
        older = self._of_rows or ("weight_scale" in tensors and "weight_scale_inv" not in tensors)
        scale = "weight_scale" if older else "weight_scale_inv"
        shapes = channel_shapes(N) if self._of_rows else (*TENSOR_SHAPES, *channel_shapes(N))
        if self._block is not None:
            shapes = (block_shape(N, K, self._block),)
        check_tensor(module, tensors, scale, FLOAT8_SCALES, *shapes)
        rows = self._block[0] if self._block else 1
        return float8_weight(f"{module}.weight", tensors["weight"], tensors[scale], rows)
