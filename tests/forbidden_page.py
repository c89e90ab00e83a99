"""Tensors behind whose end nothing may be read or written."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor


def before_a_forbidden_page(tensor: Tensor) -> Tensor:
    """Return a copy whose memory ends where the process may neither read nor write: to go on is to crash."""
    pages_bytes = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages_bytes + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + pages_bytes), mmap.PAGESIZE, 0) == 0
    bytes_ = torch.frombuffer(memory, dtype=torch.uint8, count=tensor.nbytes, offset=pages_bytes - tensor.nbytes)
    return bytes_.view(tensor.dtype).view(tensor.shape).copy_(tensor)
