"""Shared by the lossy codecs: arithmetic in float32 on one tile after the other, in the same memory.

It uses numpy, whose calls take a third as long as torch's; both round every operation once.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.coding.memory import scratch


def work_in(out: Tensor, use: str) -> np.ndarray:
    """Return float32 memory in which the tile `out` [r, c] is computed: its own, or scratch if it has another dtype."""
    return out.numpy() if out.dtype == torch.float32 else scratch(use, out.shape)


def to_float32(elements: Tensor, use: str) -> np.ndarray:
    """Return the elements of a tile as float32 [r, c]: a view, or scratch if they have another dtype."""
    values = work_in(elements, use)
    if elements.dtype != torch.float32:
        torch.from_numpy(values).copy_(elements)
    return values


def round_to_(values: np.ndarray, dtype: torch.dtype) -> None:
    """Round float32 values to what `dtype` can hold, in place."""
    if dtype != torch.float32:
        tensor = torch.from_numpy(values)
        tensor.copy_(tensor.to(dtype))


def zeros_in(values: np.ndarray) -> np.ndarray | None:
    """Return bool, true where the value is zero; None if no value is zero."""
    zeros = values == 0
    return zeros if zeros.any() else None


def moved_from(same: np.ndarray) -> np.ndarray:
    """Return float32 scratch, 0 where `same` is true, else 1.

    To multiply by it takes 25 us for 2**17 elements; `np.copyto(..., where=same)` 700 us if `same` is random.
    """
    moved = scratch("moved", same.shape)
    np.copyto(moved, np.logical_not(same))
    return moved


def split_misfits(errors: np.ndarray, limit: float) -> tuple[Tensor | None, float]:
    """Return where errors of a tile exceed the limit or are NaN, int64 [m] or None, and the largest other one."""
    worst = max(float(errors.max()), -float(errors.min()))
    if worst <= limit:
        return None, worst
    sizes = np.abs(errors)
    fits = sizes <= limit
    return torch.from_numpy(np.flatnonzero(~fits)), float(sizes[fits].max(initial=0.0))
