"""Products with float weights that are dequantized block by block, for many rows of x."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_trainweights.kernels.cpu_features import product_dtype

# Weights that are dequantized at a time: 4 MB of float32 stay near the last-level cache.
_BLOCK_ELEMENTS = 1 << 20


def multiply_dequantized(
    x: Tensor,
    tensors: Sequence[Tensor],
    dequantize: Callable[[Sequence[Tensor], torch.dtype], Tensor],
    bias: Tensor | None,
) -> Tensor:
    """Return `F.linear(x, weight, bias)`.

    Args:
        x: Float `[*, K]`.
        tensors: What holds the weight, each `[N, ...]`.
        dequantize: From the tensors of some rows and a dtype to these rows of the weight, perhaps in scratch memory.
        bias: `[N]` or None.

    Returns:
        A new tensor `[*, N]` of the dtype of x, computed in the dtype that takes least time.
    """
    K = x.shape[-1]
    dtype = product_dtype(x.dtype, x.numel() // max(1, K))
    given, rows = x.to(dtype), max(1, _BLOCK_ELEMENTS // max(1, K))
    blocks = zip(*(tensor.split(rows) for tensor in tensors), strict=True)
    out = torch.cat([F.linear(given, dequantize(block, dtype)) for block in blocks], dim=-1)
    return (out if bias is None else out.add_(bias)).to(x.dtype)
