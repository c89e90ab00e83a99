"""Libraries of C functions, compiled at installation if there was a compiler; callers need a way to do without them."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

_logger = logging.getLogger(__name__)


class _Array(ctypes.c_void_p):
    """The type of a pointer argument for which callers pass a numpy array, or None for a null pointer."""

    @classmethod
    def from_param(cls, array: np.ndarray | None) -> ctypes.c_void_p:
        return ctypes.c_void_p(None if array is None else array.__array_interface__["data"][0])


_TYPES = {
    "a": _Array,
    "p": ctypes.c_void_p,
    "l": ctypes.c_int64,
    "i": ctypes.c_int,
    "u": ctypes.c_uint32,
    "f": ctypes.c_float,
    "s": ctypes.c_char_p,
}


def load_library(path: Path, functions: Mapping[str, str], abi: int) -> ctypes.CDLL | None:
    """Load a library and declare its functions; None if it is missing, or does not fit this machine or this code.

    On an x86 CPU without AVX2 this returns None, because compiled loops are slower than numpy's there.

    Args:
        path: The library.
        functions: Each function's name to its types, a letter each, the result first: `-` for no result, `a` for a
            contiguous array or None, `p` for an address, `l` for 64 bits, `i` for an int, `u` for 32 bits without
            sign, `f` for a float, `s` for bytes that end with 0. So `"-al"` declares
            `void function(void *array, int64_t number)`.
        abi: The number that the library's `abi()` must return. Raise both with each change of a function's arguments.
    """
    if platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX"):
        return None
    try:
        # The library takes OpenMP's functions from the copy that PyTorch loaded. If they are missing, RTLD_NOW makes
        # this call fail; by default the process would end when a function is first called. Windows has no RTLD_NOW,
        # because it always looks for all functions at once.
        library = ctypes.CDLL(str(path), mode=getattr(os, "RTLD_NOW", ctypes.DEFAULT_MODE))
    except OSError:
        return None
    try:
        _declare(library, functions)
        library_abi = library.abi()
        fault = "" if library_abi == abi else f"abi() is {library_abi} and not {abi}"
    except AttributeError as error:
        fault = str(error)
    if fault:
        _logger.warning(
            "%s was compiled from other sources than those beside it, so slower code is used instead (%s). "
            "Run `pip install -e .` again.",
            path,
            fault,
        )
    return None if fault else library


def address_of(tensor: torch.Tensor | None) -> int | None:
    """Return the address of a tensor's first element, for an argument of type `p`; None, a null pointer, for None."""
    return None if tensor is None else tensor.data_ptr()


def _declare(library: ctypes.CDLL, functions: Mapping[str, str]) -> None:
    for name, (result, *arguments) in functions.items():
        function = getattr(library, name)
        function.restype = _TYPES.get(result)
        function.argtypes = [_TYPES[letter] for letter in arguments]
