"""Products with quantized weights that do not hold a whole float weight in memory.

A kernel is a `torch.library` op of plain tensors, so that torch.compile and torch.export keep it whole and PyTorch's
dispatcher chooses its implementation by device. Ops of stored tensors are in `stored`, those of tiles in
`tiled_products`; what has no op is dequantized and multiplied in blocks (`dequantized`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_trainweights.formats.base import Format
from hf_trainweights.formats.column_scale import COLUMN_SCALE, ColumnScaled
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.uint import UInt4
from hf_trainweights.kernels import int4_tiles, stored, tiled_products, uint4_tiles
from hf_trainweights.kernels.advice import slowness
from hf_trainweights.kernels.arguments import MultiplyFew, only_fitting
from hf_trainweights.kernels.column_scale import WithColumnScale, scale_columns
from hf_trainweights.kernels.int4_tiles import Int4Tiles
from hf_trainweights.kernels.layouts import Layout
from hf_trainweights.kernels.thresholds import ALL
from hf_trainweights.kernels.uint4_tiles import UInt4Tiles, for_int4

__all__ = ["choose_layout", "linear", "prepare_few_rows", "slowness"]


def linear(
    x: Tensor,
    held: Mapping[str, Tensor],
    form: Format,
    layout: Layout | None,
    bias: Tensor | None = None,
) -> Tensor | None:
    """Return `F.linear(x, weight, bias)` of a quantized weight by an op.

    Args:
        x: Float `[*, K]`, of the dtype that the weight shows; any strides.
        held: The tensors that hold a weight `[N, K]`; any strides.
        form: Its format.
        layout: The layout that they are in; None for the stored tensors of `form` themselves.
        bias: `[N]`, of the dtype of `x`, or None.

    Returns:
        A new tensor `[*, N]` of the dtype of `x`; None where there is no op for it.
    """
    if isinstance(form, ColumnScaled):
        inner = layout.inner if isinstance(layout, WithColumnScale) else None
        return linear(scale_columns(x, held), held, form.inner, inner, bias)
    # Every other row of a weight lies apart, and ops of PyTorch read some tensors by their address alone.
    held = {name: tensor.contiguous() for name, tensor in held.items()}
    if isinstance(layout, UInt4Tiles):
        return tiled_products.linear(x, for_int4(held), layout.codes, bias)
    if isinstance(layout, Int4Tiles):
        return tiled_products.linear(x, held, layout, bias)
    return stored.linear(x, held, form, bias)


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
        dtype: Dtype that the weight shows.

    Returns:
        A function that takes any plain x and bias, without gradients, and gives the same bits as `linear`, or None
        for those that it leaves to `linear`; None where there is no such function.
    """
    if isinstance(form, ColumnScaled):
        inner = layout.inner if isinstance(layout, WithColumnScale) else None
        multiply_few = prepare_few_rows(held, form.inner, inner, dtype)
        if multiply_few is None:
            return None
        N, K = len(held["qdata"]), held[COLUMN_SCALE].shape[-1]
        return only_fitting(lambda x, bias: multiply_few(scale_columns(x, held), bias), N, K, dtype, ALL)
    if not all(tensor.is_contiguous() for tensor in held.values()):
        return None
    if isinstance(layout, UInt4Tiles):
        return tiled_products.prepare_few_rows(for_int4(held), layout.codes, dtype)
    if isinstance(layout, Int4Tiles):
        return tiled_products.prepare_few_rows(held, layout, dtype)
    return stored.prepare_few_rows(held, form, dtype)


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
    if device.type != "cpu":
        return None
    if isinstance(form, UInt4):
        return uint4_tiles.choose_layout(form, shape, dtype)
    return int4_tiles.choose_layout(form, shape, dtype) if isinstance(form, Int4) else None
