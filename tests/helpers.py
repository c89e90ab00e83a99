"""Measures that several test files share: signal-to-noise, stored scales, the bytes of a directory; and damage."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new tensors of PyTorch's have this dtype, as training in half precision does."""
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def contents(directory: Path) -> dict[str, bytes]:
    """Return the bytes of all files of a directory and those below it, by path."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def flip_a_bit(path: Path, at: int | None = None) -> None:
    """Flip the lowest bit of one byte of a file, by default of the one in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    path.write_bytes(content)


def snr_db(reference: Tensor, approximation: Tensor) -> float:
    """Return the signal-to-noise ratio of an approximation in decibels."""
    reference, approximation = reference.double(), approximation.double()
    noise = (approximation - reference).square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(reference.square().sum().item() / noise)


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
