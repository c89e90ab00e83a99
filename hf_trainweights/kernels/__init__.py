"""Products with quantized weights that do not dequantize them first: one file a format, one line in `KERNELS`.

A kernel is a `torch.library` op of plain tensors, so that torch.compile and torch.export keep it whole and PyTorch's
dispatcher chooses its implementation by device. A fast path is never needed for a right result: what no kernel takes
is dequantized and multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.formats.base import Format
from hf_trainweights.kernels import int4, int4_tiles, int8

FewRows = Callable[[Tensor, Tensor | None], Tensor | None]

# By the format's name: a function with the arguments of `linear`.
KERNELS: dict[str, Callable[[Tensor, Mapping[str, Tensor], Any, Tensor | None], Tensor | None]] = {
    "int8": int8.linear,
    "int4": int4.linear,
    "int4_tiles": int4.linear,
}

# By the format's name: a function with the arguments of `few_rows`.
FEW_ROWS: dict[str, Callable[[Mapping[str, Tensor], Any, torch.dtype], FewRows | None]] = {
    "int8": int8.few_rows,
    "int4_tiles": int4.few_rows,
}

# By the canonical format's name: a function with the arguments of `layout`.
LAYOUTS: dict[str, Callable[[Any, Sequence[int], torch.dtype, torch.device], Format]] = {
    "int4": int4_tiles.layout,
}


def linear(
    x: Tensor,
    tensors: Mapping[str, Tensor],
    form: Format,
    bias: Tensor | None = None,
) -> Tensor | None:
    """Return `F.linear(x, weight, bias)` of a quantized weight, without the whole float weight in memory.

    Args:
        x: Float `[*, K]`, of the dtype that the weight shows; any strides.
        tensors: The stored tensors of a weight `[N, K]`, as `form` names them.
        form: Their format.
        bias: `[N]`, of the dtype of `x`, or None.

    Returns:
        A new tensor `[*, N]` of the dtype of `x`; None where there is no fast path, and the caller dequantizes.
    """
    kernel = KERNELS.get(form.name)
    return None if kernel is None else kernel(x, tensors, form, bias)


def few_rows(tensors: Mapping[str, Tensor], form: Format, dtype: torch.dtype) -> FewRows | None:
    """Return a function that multiplies the few rows of a decoding step, all that a weight settles being settled.

    While a weight streams through the caches it drives Python's own code out of them, so that what takes 15 us when
    it is repeated takes 100 us between two weights.

    Args:
        tensors: The stored tensors of a weight `[N, K]`, as `form` names them.
        form: Their format.
        dtype: Dtype of x.

    Returns:
        From x `[*, K]` of that dtype, without a gradient, and a bias `[N]` or None to what `linear` returns, the same
        bits; the function returns None for an x that it leaves to `linear`. None where there is no such function.
    """
    prepare = FEW_ROWS.get(form.name)
    return None if prepare is None else prepare(tensors, form, dtype)


def layout(form: Format, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Format:
    """Return the format in whose memory layout a weight is multiplied fastest: `form`, or one private to a kernel.

    Args:
        form: A canonical format.
        shape: Shape of the stored weight, `[*, N, K]`.
        dtype: Dtype of its scales, which is that of the activations.
        device: Where the weight is.
    """
    choose = LAYOUTS.get(form.name)
    return form if choose is None else choose(form, shape, dtype, device)
