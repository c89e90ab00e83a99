"""Products with quantized weights that do not dequantize them first: one file a format, one line in `KERNELS`.

A kernel is a `torch.library` op of plain tensors, so that torch.compile and torch.export keep it whole and PyTorch's
dispatcher chooses its implementation by device. A fast path is never needed for a right result: a weight that no
kernel takes is dequantized and multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_trainweights.formats.base import Format
from hf_trainweights.formats.column_scale import ColumnScaled
from hf_trainweights.kernels import float8, int4, int4_tiles, int8, uint, uint4_tiles
from hf_trainweights.kernels.column_scale import WithColumnScale, scale_columns
from hf_trainweights.kernels.compiled import MultiplyFew
from hf_trainweights.kernels.layouts import Layout


class Kernel(NamedTuple):
    """The functions of one format.

    Args:
        linear: With the arguments of `kernels.linear`, the held tensors contiguous.
        prepare_few_rows: With the arguments of `kernels.prepare_few_rows`, the held tensors contiguous.
        choose_layout: From the format and shape of a weight on the CPU and the dtype of its scales to a layout or
            None; None where the kernel reads the stored tensors as they are.
        slowness: From the format and dtype of a weight to what users are told where products in it are slow on a CPU,
            else None.
    """

    linear: Callable[[Tensor, Mapping[str, Tensor], Any, Any, Tensor | None], Tensor | None]
    prepare_few_rows: Callable[[Mapping[str, Tensor], Any, Any, torch.dtype], MultiplyFew | None]
    choose_layout: Callable[[Format, Sequence[int], torch.dtype], Layout | None] | None = None
    slowness: Callable[[Any, torch.dtype], str | None] | None = None


# By the format's name.
KERNELS = {
    "int8": Kernel(int8.linear, int8.prepare_few_rows, slowness=int8.slowness),
    "coded": Kernel(int8.linear, int8.prepare_few_rows),
    "float8_e4m3": Kernel(float8.linear, float8.prepare_few_rows, slowness=float8.slowness),
    "int4": Kernel(int4.linear, int4.prepare_few_rows, int4_tiles.choose_layout, int4.slowness),
    "uint4": Kernel(uint.linear, uint.prepare_few_rows, uint4_tiles.choose_layout, uint.slowness),
    **{f"uint{bits}": Kernel(uint.linear, uint.prepare_few_rows, slowness=uint.slowness) for bits in (2, 3, 5, 6)},
}


def linear(
    x: Tensor,
    held: Mapping[str, Tensor],
    form: Format,
    layout: Layout | None,
    bias: Tensor | None = None,
) -> Tensor | None:
    """Return `F.linear(x, weight, bias)` of a quantized weight, without the whole float weight in memory.

    Args:
        x: Float `[*, K]`, of the dtype that the weight shows; any strides.
        held: The tensors that hold a weight `[N, K]`; any strides.
        form: Its format.
        layout: The layout that they are in; None for the stored tensors of `form` themselves.
        bias: `[N]`, of the dtype of `x`, or None.

    Returns:
        A new tensor `[*, N]` of the dtype of `x`; None where there is no fast path, and the caller dequantizes.
    """
    if isinstance(form, ColumnScaled):
        inner = layout.inner if isinstance(layout, WithColumnScale) else None
        return linear(scale_columns(x, held), held, form.inner, inner, bias)
    kernel = KERNELS.get(form.name)
    if kernel is None:
        return None
    # Every other row of a weight lies apart, and ops of PyTorch read some tensors by their address alone.
    held = {name: tensor.contiguous() for name, tensor in held.items()}
    return kernel.linear(x, held, form, layout, bias)


def prepare_few_rows(
    held: Mapping[str, Tensor], form: Format, layout: Layout | None, dtype: torch.dtype
) -> MultiplyFew | None:
    """Return a function that multiplies the few rows of a decoding step, and settle now all that the weight settles.

    A weight that streams through the caches evicts Python's own code from them: steps that take 15 us when they are
    repeated take 100 us between two weights.

    Args:
        held: The tensors that hold a weight `[N, K]`; any strides.
        form: Its format.
        layout: The layout that they are in; None for the stored tensors of `form` themselves.
        dtype: Dtype of x.

    Returns:
        A function that takes x of that dtype, without a gradient, and gives the same bits as `linear`; None where
        there is no such function.
    """
    if isinstance(form, ColumnScaled):
        inner = layout.inner if isinstance(layout, WithColumnScale) else None
        multiply_few = prepare_few_rows(held, form.inner, inner, dtype)
        return multiply_few and (lambda x, bias: multiply_few(scale_columns(x, held), bias))
    kernel = KERNELS.get(form.name)
    if kernel is None or not all(tensor.is_contiguous() for tensor in held.values()):
        return None
    return kernel.prepare_few_rows(held, form, layout, dtype)


def choose_layout(form: Format, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Layout | None:
    """Return the layout in which a weight is multiplied fastest; None for its stored tensors as they are.

    Args:
        form: Its format.
        shape: Shape of the stored weight, `[*, N, K]`.
        dtype: Dtype of its scales, which is that of the activations.
        device: Where the weight is.
    """
    if isinstance(form, ColumnScaled):
        layout = choose_layout(form.inner, shape, dtype, device)
        return layout and WithColumnScale(layout)
    kernel = KERNELS.get(form.name)
    if kernel is None or kernel.choose_layout is None or device.type != "cpu":
        return None
    return kernel.choose_layout(form, shape, dtype)


def slowness(form: Format, dtype: torch.dtype) -> str | None:
    """Return what users are told of weights whose products on a CPU take longer than those of float weights, or None.

    Args:
        form: Format of the weights.
        dtype: Dtype that they show.
    """
    if isinstance(form, ColumnScaled):
        return slowness(form.inner, dtype)
    kernel = KERNELS.get(form.name)
    return None if kernel is None or kernel.slowness is None else kernel.slowness(form, dtype)
