"""Products with quantized weights that do not hold a whole float weight in memory.

A kernel is a `torch.library` op of plain tensors, so that torch.compile and torch.export keep it whole and PyTorch's
dispatcher chooses its implementation by device. The ops are in `stored`; what has no op is dequantized and multiplied
in blocks (`dequantized`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_trainweights.formats.base import Format
from hf_trainweights.formats.column_scale import COLUMN_SCALE, ColumnScaled
from hf_trainweights.kernels import stored
from hf_trainweights.kernels.advice import slowness
from hf_trainweights.kernels.arguments import MultiplyFew, only_fitting
from hf_trainweights.kernels.thresholds import ALL

__all__ = ["linear", "prepare_few_rows", "slowness"]


def linear(x: Tensor, held: Mapping[str, Tensor], form: Format, bias: Tensor | None = None) -> Tensor | None:
    """Return `F.linear(x, weight, bias)` of a quantized weight by an op.

    Args:
        x: Float `[*, K]`, of the dtype that the weight shows; any strides.
        held: The tensors that hold a weight `[N, K]`; any strides.
        form: Its format.
        bias: `[N]`, of the dtype of `x`, or None.

    Returns:
        A new tensor `[*, N]` of the dtype of `x`; None where there is no op for it.
    """
    if isinstance(form, ColumnScaled):
        return linear(_scale_columns(x, held), held, form.inner, bias)
    # Every other row of a weight lies apart, and ops of PyTorch read some tensors by their address alone.
    held = {name: tensor.contiguous() for name, tensor in held.items()}
    return stored.linear(x, held, form, bias)


def prepare_few_rows(held: Mapping[str, Tensor], form: Format, dtype: torch.dtype) -> MultiplyFew | None:
    """Return a function that multiplies the few rows of a decoding step, and settle now all that the weight settles.

    A weight that streams through the caches evicts Python's own code from them: steps that take 15 us when they are
    repeated take 100 us between two weights.

    Args:
        held: The tensors that hold a weight `[N, K]`; any strides.
        form: Its format.
        dtype: Dtype that the weight shows.

    Returns:
        A function that takes any plain x and bias, without gradients, and gives the same bits as `linear`, or None
        for those that it leaves to `linear`; None where there is no such function.
    """
    if isinstance(form, ColumnScaled):
        multiply_few = prepare_few_rows(held, form.inner, dtype)
        if multiply_few is None:
            return None
        N, K = len(held["qdata"]), held[COLUMN_SCALE].shape[-1]
        return only_fitting(lambda x, bias: multiply_few(_scale_columns(x, held), bias), N, K, dtype, ALL)
    if not all(tensor.is_contiguous() for tensor in held.values()):
        return None
    return stored.prepare_few_rows(held, form, dtype)


def _scale_columns(x: Tensor, held: Mapping[str, Tensor]) -> Tensor:
    """Return an input `[*, K]` times the column scales of a weight, rounded once.

    In a 16-bit dtype that is one rounding of the input. Beside the roundings of the inner product it keeps the error
    below 1.5 times that of the dequantized product, whose weights are rounded likewise (tests/kernels).
    """
    return (x * held[COLUMN_SCALE].view(-1)).to(x.dtype)
