"""Values for contracts: random weights, bits of tensors, errors of products, and rounding without PyTorch's help."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
import torch.nn.functional as F
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


def assert_close_product(
    result: Tensor, dense: Tensor, exact: Tensor, terms: Tensor | None = None, usual_size: float = 0.0
) -> None:
    """Check the bound that every product keeps: 1.5 times the rounding floor, and in float32 1e-6 of the norm.

    Args:
        result: The product with a quantized weight.
        dense: The product with the dequantized weight, in the same dtype. Its error is the floor, which counts as at
            least eps / 2 of the norm of `exact`.
        exact: The product with the dequantized weight in float64.
        terms: For a weight with column scales, the norm of the terms of each result's sum: x is multiplied by the
            scales and rounded once more, which adds to the floor.
        usual_size: The norm that `exact` would have with other signs of x, if it may be small by chance.
    """
    assert (result.shape, result.dtype) == (dense.shape, dense.dtype)
    size = max(exact.norm().item(), usual_size)
    floor = max((dense.double() - exact).norm().item(), torch.finfo(result.dtype).eps / 2 * size)
    if terms is not None:
        floor = math.hypot(floor, torch.finfo(result.dtype).eps / 2 * terms.norm().item())
    bound = max(1.5 * floor, 1e-6 * size)
    assert (result.double() - exact).norm().item() <= bound


def assert_close_products(
    multiply: Callable[[Tensor, Tensor | None], Tensor], weight: Tensor, dtype: torch.dtype, rows: Iterable[int]
) -> None:
    """Check the same bound of random products with several numbers of rows, with a bias and without.

    Args:
        multiply: Takes x and a bias or None, in `dtype`, and returns their product with a quantized weight.
        weight: The dequantized weight, float32 `[N, K]`.
        dtype: Dtype of x, the bias and the result.
        rows: The numbers of rows of x.
    """
    bias = weight_with_outliers(1, len(weight), dtype=dtype)[0]
    for M in rows:
        x = weight_with_outliers(M, weight.shape[1], dtype=dtype, seed=M)
        usual_size = (x.double().square() @ weight.double().square().t()).sum().sqrt().item()
        for added in (None, bias):
            exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
            dense = F.linear(x.float(), weight, None if added is None else added.float()).to(dtype)
            assert_close_product(multiply(x, added), dense, exact, usual_size=usual_size)


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
    # Round towards zero, and set the last bit if the result is inexact (round to odd): then the second rounding cannot
    # meet a false tie.
    bits = rounded.view(np.uint32)
    bits -= np.abs(rounded.astype(np.float64)) > np.abs(values)
    bits |= rounded.astype(np.float64) != values
    return torch.from_numpy(rounded).to(dtype)
