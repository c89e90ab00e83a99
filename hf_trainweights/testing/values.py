"""Values for contracts: random weights, bits of tensors, and rounding that does not depend on PyTorch's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def weight_with_outliers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return normal values with a few outliers, as weights have them; the same at every call."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (values * (1 + values.abs().pow(3) / 8) / 16).to(dtype)


def stored_bits(tensor: Tensor) -> list[int]:
    """Return the bytes of a tensor, so that zeros of either sign differ, and a NaN equals itself."""
    return tensor.contiguous().flatten().view(torch.uint8).tolist()


def assert_same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    """Check that two dicts have the same tensors in every bit, dtype and shape."""
    assert left.keys() == right.keys()
    for key, tensor in left.items():
        assert (tensor.shape, tensor.dtype) == (right[key].shape, right[key].dtype), f"shape or dtype of {key} differs"
        assert stored_bits(tensor) == stored_bits(right[key]), f"the bytes of {key} differ"


def round_once(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 values to `dtype` in one step; torch goes through float32 on the way to 16 bits."""
    values = exact.double().numpy()
    if dtype is torch.float64:
        return exact
    if dtype is torch.float16:
        return torch.from_numpy(values.astype(np.float16))
    rounded = values.astype(np.float32)
    if dtype is torch.float32:
        return torch.from_numpy(rounded)
    # Towards zero, the last bit set where anything was cut off: a second rounding then sees every tie as it is.
    bits = rounded.view(np.uint32)
    bits -= np.abs(rounded.astype(np.float64)) > np.abs(values)
    bits |= rounded.astype(np.float64) != values
    return torch.from_numpy(rounded).to(dtype)
