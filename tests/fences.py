"""Products whose every argument lies between pages that nobody may read or write."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

from hf_trainweights.formats.base import Format
from hf_trainweights.kernels import compiled

PAGE = mmap.PAGESIZE


class Fenced:
    """Memory between two pages that nobody may read or write, which it ends at, or begins behind."""

    _libc = ctypes.CDLL(None)

    def __init__(self, count: int, at_end: bool) -> None:
        pages = -(-max(count, 1) // PAGE)
        self._memory = mmap.mmap(-1, (pages + 2) * PAGE)
        self._view = (ctypes.c_uint8 * len(self._memory)).from_buffer(self._memory)
        start = ctypes.addressof(self._view)
        self._fences = (start, start + (pages + 1) * PAGE)
        self.address = self._fences[1] - count if at_end else start + PAGE
        ctypes.memset(start, 0x7F, len(self._memory))
        for fence in self._fences:
            assert self._libc.mprotect(ctypes.c_void_p(fence), PAGE, 0) == 0

    def __del__(self) -> None:
        # What unmaps the memory does not touch it.
        for fence in self._fences:
            self._libc.mprotect(ctypes.c_void_p(fence), PAGE, mmap.PROT_READ | mmap.PROT_WRITE)


def fenced(tensor: Tensor | None, at_end: bool) -> Fenced | None:
    if tensor is None:
        return None
    memory = Fenced(tensor.nbytes, at_end)
    ctypes.memmove(memory.address, tensor.contiguous().data_ptr(), tensor.nbytes)
    return memory


def product(
    library: ctypes.CDLL,
    form: Format,
    tensors: dict[str, Tensor],
    x: Tensor,
    bias: Tensor | None = None,
    threads: int = 1,
    at_end: bool = True,
) -> Tensor:
    """Return a product whose every argument, and no memory around it, may be read or written."""
    (M, K), N = x.shape, len(tensors["qdata"])
    dtypes = compiled.DTYPES[x.dtype], compiled.DTYPES.get(tensors["scale"].dtype, 0)
    described = *compiled._codes(form), *compiled._numbers(form, K)
    digits = 1 if "activations" in form.get_config() else 3 if x.dtype == torch.float32 else 2
    weight = compiled.Weight(N, K, getattr(form, "group_size", None) or 0, *dtypes, digits, *described)
    given = [fenced(each, at_end) for each in (x, tensors["qdata"], tensors["scale"], bias)]
    groups = [fenced(tensors[name], at_end) for name in form.tensor_names[2:]]
    out = Fenced(M * N * x.itemsize, at_end)
    scratch = Fenced(library.product_bytes(ctypes.addressof(weight), M, threads), at_end)
    addresses = [None if each is None else each.address for each in (*given, out)]
    numbers = [*(None if group is None else group.address for group in groups), *[None] * compiled.OTHERS][
        : compiled.OTHERS
    ]
    library.product(ctypes.addressof(weight), *addresses, M, threads, scratch.address, *numbers)
    result = torch.empty(M, N, dtype=x.dtype)
    ctypes.memmove(result.data_ptr(), out.address, result.nbytes)
    return result
