"""uint4 weights on a CPU: in tiles they are multiplied as int4 weights are, with a zero for each group."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.uint import UInt4
from hf_trainweights.kernels import int4
from hf_trainweights.kernels.compiled import MultiplyFew
from hf_trainweights.kernels.uint4_tiles import UInt4Tiles, for_int4


def linear(
    x: Tensor, held: Mapping[str, Tensor], form: UInt4, layout: UInt4Tiles | None, bias: Tensor | None
) -> Tensor | None:
    """As `hf_trainweights.kernels.linear`; outside tiles the caller dequantizes.

    Args:
        x: `[*, K]`.
        held: The tensors of a weight.
        form: The format.
        layout: The tiles that they are in; None for the stored tensors.
        bias: `[N]` or None.
    """
    if layout is None:
        return None
    return int4.linear(x, for_int4(held), Int4(form.group_size), layout.codes, bias)


def prepare_few_rows(
    held: Mapping[str, Tensor], form: UInt4, layout: UInt4Tiles | None, dtype: torch.dtype
) -> MultiplyFew | None:
    """As `hf_trainweights.kernels.prepare_few_rows`: by PyTorch's op on tiles.

    Args:
        held: The tensors of a weight.
        form: The format.
        layout: The tiles that they are in; None for the stored tensors.
        dtype: Dtype of x.
    """
    if layout is None:
        return None
    return int4.prepare_few_rows(for_int4(held), Int4(form.group_size), layout.codes, dtype)
