"""int8 weights with one scale a row, resident as the plain `[N, K]` bytes that are on disk."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_trainweights.formats.base import FLOAT_DTYPES
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.kernels.library import define

# Devices on which the op beats a product with the dequantized weight.
DEVICES = {"cpu"}

# The largest M for torch._weight_int8pack_mm.
GEMV_ROWS = 4


def linear(x: Tensor, tensors: Mapping[str, Tensor], form: Int8, bias: Tensor | None) -> Tensor | None:
    """As `hf_trainweights.kernels.linear`.

    Args:
        x: `[*, K]`.
        tensors: `qdata` `[N, K]` and `scale` `[N, 1]`.
        form: The format.
        bias: `[N]` or None.
    """
    scale = tensors["scale"]
    if (
        form.group_size is not None
        or x.device.type not in DEVICES
        or x.dtype not in FLOAT_DTYPES
        or torch.promote_types(scale.dtype, x.dtype) != x.dtype
    ):
        return None
    return LINEAR(x, tensors["qdata"], scale, bias)


def _empty_linear(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    del scale, bias
    return x.new_empty((*x.shape[:-1], qdata.shape[0]))


def _linear_cpu(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    scale = scale.to(x.dtype).view(-1)
    if len(rows) <= GEMV_ROWS and x.dtype != torch.float32:
        out = torch._weight_int8pack_mm(rows.contiguous(), qdata, scale)
    else:
        out = torch.mm(rows, qdata.to(x.dtype).t()).mul_(scale)
    if bias is not None:
        out.add_(bias)
    return out.view(*x.shape[:-1], qdata.shape[0])


LINEAR = define(
    "int8_linear(Tensor x, Tensor qdata, Tensor scale, Tensor? bias) -> Tensor", _empty_linear, CPU=_linear_cpu
)
