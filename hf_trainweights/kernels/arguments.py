"""The one check of what `F.linear` is given, before a function that reads it by its address."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from hf_trainweights.errors import UnsupportedError

# From x `[*, K]` and a bias `[N]` or None to the product `[*, N]`; None for what it does not take.
MultiplyFew = Callable[[Tensor, Tensor | None], Tensor | None]


def only_fitting(multiply: MultiplyFew, N: int, K: int, dtype: torch.dtype, most_rows: int) -> MultiplyFew:
    """Return a function that takes any x and bias, and gives None unless they lie in memory as a product reads them."""
    most_elements = min(sys.maxsize, most_rows * K)

    def checked(x: Tensor, bias: Tensor | None) -> Tensor | None:
        if x.dtype is not dtype or x.is_nested or x.dim() == 0 or x.size(-1) != K:
            return None
        if not (0 < x.numel() <= most_elements and x.is_cpu and x.is_contiguous()) or x.is_neg():
            return None
        if bias is not None and not (
            bias.dtype is dtype
            and bias.dim() == 1
            and bias.size(0) == N
            and bias.is_cpu
            and bias.is_contiguous()
            and not bias.is_neg()
        ):
            return None
        return multiply(x, bias)

    return checked


def check_allocated(*tensors: Tensor | None) -> None:
    """Raise `storage_freed` where a tensor has elements and no memory; many ops of PyTorch would end the process."""
    for tensor in tensors:
        if tensor is not None and tensor.numel() and not tensor.data_ptr():
            raise storage_freed()


def storage_freed() -> UnsupportedError:
    """Return the error for a tensor whose storage was freed, as `fully_shard` does with parameters between products."""
    return UnsupportedError(
        "F.linear",
        "an input, a weight and a bias that are in memory",
        "one whose storage was freed (untyped_storage().resize_(0))",
        "Multiply before it is freed, or after it was gathered or computed again.",
    )
