"""Products with quantized weights that do not dequantize them first: one file a format, one line in `KERNELS`.

A kernel is a `torch.library` op of plain tensors, so that torch.compile and torch.export keep it whole and PyTorch's
dispatcher chooses its implementation by device. A fast path is never needed for a right result: what no kernel takes
is dequantized and multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from hf_trainweights.formats.base import Format
from hf_trainweights.kernels import int8

# By the format's name: a function with the arguments of `linear`.
KERNELS: dict[str, Callable[[Tensor, Mapping[str, Tensor], Any, Tensor | None], Tensor | None]] = {
    "int8": int8.linear,
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
