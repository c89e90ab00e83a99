"""Memory for weights: huge pages of it where Linux gives them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

# On x86-64 and, with pages of 4 kB, on AArch64; where huge pages are larger, none is used.
_HUGE_PAGE_BYTES = 1 << 21


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return an uninitialised tensor that is meant to stay: on Linux in huge pages, as far as they are filled.

    To touch a page for the first time takes a microsecond: for pages of 4 kB, half of the time of writing a weight.
    What is freed goes back to the system at once.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        device: Where; huge pages are for the CPU.

    Returns:
        A new contiguous tensor.

    Raises:
        RuntimeError: There is not so much memory.

    Example:
        >>> empty((2, 3), torch.int8, "cpu").shape
        torch.Size([2, 3])
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    filled_bytes = size_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if advice is None or not filled_bytes or torch.device(device).type != "cpu":
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    try:
        # What is mapped but never touched takes no memory.
        pages = mmap.mmap(-1, size_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % _HUGE_PAGE_BYTES
        pages.madvise(advice, start, filled_bytes)
    except OSError:
        # A kernel without huge pages refuses the advice; where memory is short torch says so in its own words.
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return torch.frombuffer(pages, dtype=torch.uint8, count=size_bytes, offset=start).view(dtype).view(tuple(shape))
