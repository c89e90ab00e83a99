"""uint2 to uint6 weights on a CPU: a few rows by compiled products; uint4 in tiles as int4 weights are."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.planes import COLUMNS
from hf_trainweights.formats.uint import UInt, UInt2, UInt3, UInt4, UInt5, UInt6
from hf_trainweights.kernels import compiled, int4
from hf_trainweights.kernels.cpu_features import product_dtype
from hf_trainweights.kernels.dequantized import multiply_dequantized
from hf_trainweights.kernels.guards import Needs, guarded
from hf_trainweights.kernels.registration import define
from hf_trainweights.kernels.uint4_tiles import GROUP_SIZE, UInt4Tiles, for_int4

# Rows up to which a compiled product takes less time in a dtype that the CPU multiplies fast: docs/performance.md.
_MOST_ROWS = 64

# By the bits of a code.
_FORMATS: dict[int, type[UInt]] = {form.grid.bits: form for form in (UInt2, UInt3, UInt4, UInt5, UInt6)}


def linear(
    x: Tensor, held: Mapping[str, Tensor], form: UInt, layout: UInt4Tiles | None, bias: Tensor | None
) -> Tensor | None:
    """As `hf_trainweights.kernels.linear`; None where there are neither tiles nor compiled products.

    Args:
        x: `[*, K]`.
        held: The tensors of a weight.
        form: The format.
        layout: The tiles that they are in; None for the stored tensors.
        bias: `[N]` or None.
    """
    if layout is not None:
        return int4.linear(x, for_int4(held), Int4(form.group_size), layout.codes, bias)
    scale = held["scale"]
    if x.device.type != "cpu" or not compiled.serves(form.group_size, x.dtype, scale.dtype):
        return None
    groups = held["group_scale"], held["zero_point"]
    return LINEAR(x, held["qdata"], scale, *groups, bias, form.group_size)


def prepare_few_rows(
    held: Mapping[str, Tensor], form: UInt, layout: UInt4Tiles | None, dtype: torch.dtype
) -> compiled.MultiplyFew | None:
    """As `hf_trainweights.kernels.prepare_few_rows`.

    Args:
        held: The tensors of a weight.
        form: The format.
        layout: The tiles that they are in; None for the stored tensors.
        dtype: Dtype of x.
    """
    if layout is not None:
        return int4.prepare_few_rows(for_int4(held), Int4(form.group_size), layout.codes, dtype)
    qdata, scale = held["qdata"], held["scale"]
    if qdata.dim() != 2 or qdata.device.type != "cpu" or scale.dtype != dtype:
        return None
    *_, N, K = form.shape_of(qdata)
    product = _find_compiled(N, K, form, dtype, scale.dtype)
    groups = held["group_scale"], held["zero_point"]
    return product and compiled.settle(product, qdata, scale, dtype, most_rows(dtype), groups)


def slowness(form: UInt, dtype: torch.dtype) -> str | None:
    """As `hf_trainweights.kernels.slowness`: in a dtype that the CPU multiplies fast, float weights are faster.

    Args:
        form: The format of the weights.
        dtype: Dtype that they show.
    """
    if form == UInt4(GROUP_SIZE) and dtype == torch.bfloat16:
        return None
    if not compiled.is_available():
        return (
            f"{form.name} weights: on the CPU each product dequantizes them first and takes longer than one with "
            "float weights. int8, or int4 or uint4 in groups of 32 with dtype=torch.bfloat16, is fast."
        )
    if most_rows(dtype) > _MOST_ROWS:
        return None
    return (
        f"{form.name} weights: on this CPU a product of many tokens takes twice as long as one with float weights, and "
        "more. int8 is fast."
    )


def most_rows(dtype: torch.dtype) -> int:
    """Return up to how many rows of x a compiled product takes less time than one with the dequantized weight.

    Args:
        dtype: Dtype of x.
    """
    return sys.maxsize if product_dtype(dtype, _MOST_ROWS + 1) != dtype else _MOST_ROWS


def _find_compiled(N: int, K: int, form: UInt, dtype: torch.dtype, scale_dtype: torch.dtype) -> compiled.Product | None:
    units = form.grid.code_units, form.grid.zero_units
    return compiled.find(N, K, form.group_size, form.grid.bits, dtype, scale_dtype, False, units)


def _empty_linear(x: Tensor, qdata: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], qdata.shape[0]))


def _linear_cpu(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    group_scale: Tensor,
    zero_point: Tensor,
    bias: Tensor | None,
    group_size: int,
) -> Tensor:
    (N, words), K = qdata.shape, x.shape[-1]
    form = _FORMATS[words * COLUMNS // K](group_size)
    product = _find_compiled(N, K, form, x.dtype, scale.dtype)
    if product is not None and 0 < x.numel() // K <= most_rows(x.dtype):
        return product.of_any_strides(x, qdata, scale, bias, (group_scale, zero_point))

    def dequantize(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return form.dequantize_rows(dict(zip(form.tensor_names, tensors, strict=True)), K, dtype)

    return multiply_dequantized(x, (qdata, scale, group_scale, zero_point), dequantize, bias)


_guard = guarded(
    "hf_trainweights::uint_linear",
    Needs("x", ("*", "K"), any_strides=True),
    Needs("qdata", ("N", "words"), (torch.int32,)),
    Needs("scale", ("N", 1)),
    Needs("group_scale", ("N", "pairs"), (torch.uint8,)),
    Needs("zero_point", ("N", "pairs"), (torch.uint8,)),
    Needs("bias", ("N",), any_strides=True),
)

LINEAR = define(
    "uint_linear(Tensor x, Tensor qdata, Tensor scale, Tensor group_scale, Tensor zero_point, Tensor? bias, "
    "int group_size) -> Tensor",
    _empty_linear,
    CPU=_guard(_linear_cpu),
)
