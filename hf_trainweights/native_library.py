"""Libraries of C functions that the installation compiled if it could; whoever uses one has another way without it."""

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
    """An argument for which numpy arrays stand, and None for a null pointer."""

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
}


def load_library(path: Path, functions: Mapping[str, str], abi: int) -> ctypes.CDLL | None:
    """Load a library and declare its functions; None where it is missing, or does not fit this machine or this code.

    An x86 CPU without AVX2 gets none: there a compiler's loops take longer than those of numpy.

    Args:
        path: The library.
        functions: By name the types of result and arguments, a letter each: `a` for a contiguous array or None, `p` for
            an address, `l` for 64 bits, `i` for an int, `u` for 32 bits without sign, `f` for a float; first the
            result, `-` if there is none.
        abi: What its function `abi()` has to return. Both numbers rise with each change of what a function is given.
    """
    if platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX"):
        return None
    try:
        # At once, because a missing symbol of OpenMP, which PyTorch brings, would end the process at its first use.
        # Windows, which has no name for that, has no other way.
        library = ctypes.CDLL(str(path), mode=getattr(os, "RTLD_NOW", ctypes.DEFAULT_MODE))
    except OSError:
        return None
    try:
        _declare(library, functions)
        found = library.abi()
        fault = "" if found == abi else f"abi() is {found} and not {abi}"
    except AttributeError as error:
        fault = str(error)
    if fault:
        _logger.warning(
            "%s was compiled from other sources than those beside it, so slower ways serve (%s). "
            "Run `pip install -e .` again.",
            path,
            fault,
        )
    return None if fault else library


def _declare(library: ctypes.CDLL, functions: Mapping[str, str]) -> None:
    for name, (result, *arguments) in functions.items():
        function = getattr(library, name)
        function.restype = _TYPES.get(result)
        function.argtypes = [_TYPES[each] for each in arguments]
