"""Loads the C functions of `native/`: the loops of the lossy codecs and of their symbols.

If they are not compiled, each codec does the same in numpy and gets the same bits, because both round each operation
once, in the same order. One C call does all passes over a tile without taking Python's lock, which training needs. All
arrays are contiguous. Tiles are float32 [r, c], whatever the dtype of the tensor.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from hf_trainweights.native_library import load_library

_LIBRARY = Path(__file__).parents[1] / "native" / "levels.so"
_ABI = 3
_FUNCTIONS = {
    "delta_levels": "laaaaafffillaap",
    "delta_decode": "-aaaaafllaa",
    "update_levels": "laaffillaap",
    "update_decode": "-aaafllaa",
    "row_levels": "laafillaap",
    "row_decode": "-aallaa",
    "log_levels": "-aaaaafuillaaaa",
    "log_decode": "-aaaullaa",
    "pack_tiles": "-aallllaaaaa",
    "unpack_levels": "laalia",
    "put_escapes": "lallia",
}

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The numbers of dtypes in native/levels.c."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the C functions, or None if they are not compiled."""
    return load_library(_LIBRARY, _FUNCTIONS, _ABI)
