"""Measures that several test files share: signal-to-noise, errors of products, stored scales."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from weights import random_weight


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new tensors of PyTorch's have this dtype, as training in half precision does."""
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def snr_db(reference: Tensor, approximation: Tensor) -> float:
    """Return the signal-to-noise ratio of an approximation in decibels."""
    reference, approximation = reference.double(), approximation.double()
    noise = (approximation - reference).square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(reference.square().sum().item() / noise)


def assert_close_product(result: Tensor, dense: Tensor, exact: Tensor, terms: Tensor | None = None) -> None:
    """Check the bound that every fast path keeps: 1.5 times the rounding floor, and in float32 1e-6 of the norm.

    Args:
        result: What a quantized weight gave.
        dense: What the dequantized weight gave, in the same dtype; its error is the floor, at least half a unit.
        exact: What the dequantized weight gave in float64.
        terms: Of a weight with column scales, for each result the norm of the terms of its sum: their input is rounded
            once more, which adds to the floor.
    """
    assert (result.shape, result.dtype) == (dense.shape, dense.dtype)
    size = exact.norm().item()
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
        multiply: From x and a bias or None, in `dtype`, to what a quantized weight gives.
        weight: The dequantized weight, float32 `[N, K]`.
        dtype: Dtype of x, the bias and the result.
        rows: Each number of rows of x.
    """
    bias = random_weight(1, len(weight), dtype=dtype)[0]
    for M in rows:
        x = random_weight(M, weight.shape[1], dtype=dtype, seed=M)
        for added in (None, bias):
            exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
            dense = F.linear(x.float(), weight, None if added is None else added.float()).to(dtype)
            assert_close_product(multiply(x, added), dense, exact)


def stored_scale(amax: float, divisor: float, largest: float, dtype: torch.dtype) -> float:
    """Return the scale that `docs/format.md` prescribes for a group, one step after the other.

    Args:
        amax: Largest magnitude of the group.
        divisor: The code it is to fall on.
        largest: The largest scale that the format allows in `dtype`.
        dtype: Dtype of the scale.
    """
    quotient = np.float32(amax) / np.float32(divisor)
    if quotient == 0:
        return 0.0
    smallest = 2.0**-24 if dtype is torch.float16 else 2.0**-126
    wanted = np.float32(min(max(quotient, smallest), largest))
    stored = torch.tensor(wanted).to(dtype).item()
    if dtype is torch.float16 and stored * 257 / 256 < wanted:
        stored = float(np.nextafter(np.float16(stored), np.float16(np.inf)))
    return stored
