"""The loops of the lossy codecs and of their symbols as the C functions of `native/`.

Where they are not compiled, each codec does the same in numpy, to the last bit: each operation is rounded once, in the
same order. One call does all passes over a tile and does not come back to Python's lock, which training needs. All
arrays are contiguous; tiles are float32 [r, c], whatever the dtype of the tensor.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from hf_trainweights.native_library import load_library

_LIBRARY = Path(__file__).parents[1] / "native" / "levels.so"
_ABI = 2
_FUNCTIONS = {
    "delta_levels": "laaaaafffillaap",
    "delta_decode": "-aaaaafllaa",
    "update_levels": "laaffillaap",
    "update_decode": "-aaafllaa",
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
    """Return the functions; None where they are not compiled."""
    return load_library(_LIBRARY, _FUNCTIONS, _ABI)
