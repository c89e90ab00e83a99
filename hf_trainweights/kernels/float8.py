"""float8_e4m3 weights on a CPU: a few rows by compiled products, many by products with dequantized blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.kernels import compiled
from hf_trainweights.kernels.cpu_features import product_dtype
from hf_trainweights.kernels.dequantized import multiply_dequantized
from hf_trainweights.kernels.guards import Needs, guarded
from hf_trainweights.kernels.registration import define
from hf_trainweights.kernels.scratch import SCRATCH


def linear(x: Tensor, held: Mapping[str, Tensor], form: Float8E4M3, layout: None, bias: Tensor | None) -> Tensor | None:
    """As `hf_trainweights.kernels.linear`; None where there are no compiled products.

    Args:
        x: `[*, K]`.
        held: `qdata` `[N, K]` and `scale` `[N, 1]`.
        form: The format.
        layout: None: the codes are read as they are stored.
        bias: `[N]` or None.
    """
    del form, layout
    qdata, scale = held["qdata"], held["scale"]
    if x.device.type != "cpu" or not compiled.serves(None, x.dtype, scale.dtype):
        return None
    return LINEAR(x, qdata, scale, bias)


def prepare_few_rows(
    held: Mapping[str, Tensor], form: Float8E4M3, layout: None, dtype: torch.dtype
) -> compiled.MultiplyFew | None:
    """As `hf_trainweights.kernels.prepare_few_rows`.

    Args:
        held: `qdata` `[N, K]` and `scale` `[N, 1]`.
        form: The format.
        layout: None: the codes are read as they are stored.
        dtype: Dtype of x.
    """
    del form, layout
    qdata, scale = held["qdata"], held["scale"]
    if qdata.dim() != 2 or qdata.device.type != "cpu" or scale.dtype != dtype:
        return None
    product = _find_compiled(qdata, scale, dtype)
    return product and compiled.settle(product, qdata, scale, dtype, compiled.most_widened_rows(dtype))


def slowness(form: Float8E4M3, dtype: torch.dtype) -> str | None:
    """As `hf_trainweights.kernels.slowness`: of more than a few rows a product with float weights is faster.

    Args:
        form: The format of the weights.
        dtype: Dtype that they show.
    """
    del form
    if compiled.is_available() and product_dtype(dtype, compiled.most_widened_rows(dtype) + 1) != dtype:
        return None
    return (
        "float8 weights: on this CPU a product of many tokens dequantizes them first and takes longer than one with "
        "float weights. int8 is fast."
    )


def _find_compiled(qdata: Tensor, scale: Tensor, dtype: torch.dtype) -> compiled.Product | None:
    return compiled.find(*qdata.shape, None, compiled.FLOAT8, dtype, scale.dtype, False)


def _empty_linear(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    del scale, bias
    return x.new_empty((*x.shape[:-1], qdata.shape[0]))


def _linear_cpu(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    product = _find_compiled(qdata, scale, x.dtype)
    M = x.numel() // max(1, qdata.shape[1])
    if product is not None and 0 < M <= compiled.most_widened_rows(x.dtype):
        return product.of_any_strides(x, qdata, scale, bias)
    return multiply_dequantized(x, (qdata, scale), _dequantize, bias)


def _dequantize(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return rows of the weight, perhaps in scratch memory."""
    qdata, scale = tensors
    product = _find_compiled(qdata, scale, dtype)
    # A program that was exported where there are compiled products may run where there are none.
    if product is None:
        return Float8E4M3().dequantize_rows({"qdata": qdata, "scale": scale}, qdata.shape[1], dtype)
    out = SCRATCH.take("weight", tuple(qdata.shape), dtype)
    return product.dequantize(qdata.contiguous(), scale.contiguous(), out)


_guard = guarded(
    "hf_trainweights::float8_linear",
    Needs("x", ("*", "K"), any_strides=True),
    Needs("qdata", ("N", "K"), (torch.float8_e4m3fn,)),
    Needs("scale", ("N", 1)),
    Needs("bias", ("N",), any_strides=True),
)

LINEAR = define(
    "float8_linear(Tensor x, Tensor qdata, Tensor scale, Tensor? bias) -> Tensor",
    _empty_linear,
    CPU=_guard(_linear_cpu),
)
