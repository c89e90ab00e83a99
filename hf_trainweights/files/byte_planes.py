"""Tensors as words, and words as planes of bytes of equal significance.

Of a floating point word the bits are rotated left by one, so that the exponent fills the top byte and the sign goes to
the lowest bit: mantissas are noise, but exponents repeat.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.native_library import load_library

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_LIBRARY = Path(__file__).parent / "native" / "planes.so"
_ABI = 3
_FOR_WORDS = {
    "split": "-alial",
    "join": "-plia",
    "add": "-aal",
    "subtract_sums": "-aaalla",
    "add_sums": "-aaall",
}
_FUNCTIONS = {f"{name}_{size}": types for name, types in _FOR_WORDS.items() for size in (2, 4)} | {"split_8": "-alial"}


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """Return the C functions of `native/`, several times as fast as numpy; None where they are not compiled."""
    return load_library(_LIBRARY, _FUNCTIONS, _ABI)


def compiled_for(name: str, words: np.ndarray) -> Callable[..., None] | None:
    """Return the C function of that name for words of this size, 2 or 4 bytes; None where there is none."""
    library = compiled() if words.itemsize in (2, 4) else None
    return library and getattr(library, f"{name}_{words.itemsize}")


def word_layout(shape: torch.Size, dtype: torch.dtype) -> tuple[int, int]:
    """Return bytes per component and the number of components of a tensor."""
    itemsize = dtype.to_real().itemsize if dtype.is_complex else dtype.itemsize
    return itemsize, shape.numel() * dtype.itemsize // itemsize


def words_of(tensor: Tensor) -> np.ndarray:
    """Return the components of a contiguous tensor as integers, 1-D, a view."""
    return tensor.reshape(-1).view(WORDS[word_layout(tensor.shape, tensor.dtype)[0]]).numpy()


def fold(words: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return a copy of integers, those of floats rotated left by one bit."""
    if not _is_rotated(words, dtype):
        return words.copy()
    # The arithmetic shift gives 0 or -1, and the left shift an even number: subtracting sets the lowest bit.
    folded = words << 1
    folded -= words >> (8 * words.itemsize - 1)
    return folded


def split_planes(words: np.ndarray, planes: np.ndarray, folded: torch.dtype | None = None) -> None:
    """Fill `planes`, [itemsize, len(words)], with the bytes of contiguous words; with a dtype, as `fold` makes them."""
    library, is_rotated = compiled(), folded is not None and _is_rotated(words, folded)
    if library and words.itemsize > 1:
        getattr(library, f"split_{words.itemsize}")(words, len(words), is_rotated, planes, planes.strides[0])
    else:
        given = words if folded is None else fold(words, folded)
        planes[:] = given.view(np.uint8).reshape(-1, words.itemsize).T


def join_planes(planes: Sequence[np.ndarray], words: np.ndarray, folded: torch.dtype | None = None) -> None:
    """Fill contiguous words, 1-D, with their bytes of each significance, lowest first.

    With a dtype the bytes are those of words that `fold` made, and what it was given comes back.
    """
    function, is_rotated = compiled_for("join", words), folded is not None and _is_rotated(words, folded)
    if function is not None:
        pointers = (ctypes.c_void_p * len(planes))(*(plane.__array_interface__["data"][0] for plane in planes))
        function(ctypes.addressof(pointers), len(words), is_rotated, words)
        return
    for place, plane in enumerate(planes):
        words.view(np.uint8)[place :: words.itemsize] = plane
    if is_rotated:
        unsigned = words.view(f"u{words.itemsize}")
        sign = unsigned << (8 * words.itemsize - 1)
        np.right_shift(unsigned, 1, out=unsigned)
        np.bitwise_or(unsigned, sign, out=unsigned)


def _is_rotated(words: np.ndarray, dtype: torch.dtype) -> bool:
    return words.itemsize > 1 and (dtype.is_floating_point or dtype.is_complex)
