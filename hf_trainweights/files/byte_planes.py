"""Tensors as words, and words as planes of bytes of equal significance.

Of a floating point word the bits are rotated left by one, so that the exponent fills the top byte and the sign goes to
the lowest bit: mantissas are noise, but exponents repeat.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.files.native_library import address, load_library

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_LIBRARY = Path(__file__).parent / "native" / "planes.so"
_FUNCTIONS = {"split_2": "-plpl", "split_4": "-plpl", "split_8": "-plpl", "join_2": "-plp", "join_4": "-plp"}


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """Return the C functions of `native/`, several times as fast as numpy; None where they are not compiled."""
    return load_library(_LIBRARY, _FUNCTIONS)


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


def unfold_(words: np.ndarray, dtype: torch.dtype) -> None:
    """Undo `fold`, in place."""
    if _is_rotated(words, dtype):
        unsigned = words.view(f"u{words.itemsize}")
        sign = unsigned << (8 * words.itemsize - 1)
        np.right_shift(unsigned, 1, out=unsigned)
        np.bitwise_or(unsigned, sign, out=unsigned)


def split_planes(words: np.ndarray, planes: np.ndarray) -> None:
    """Fill `planes`, [itemsize, len(words)], with the bytes of contiguous unsigned words, which are overwritten."""
    library = compiled()
    if library and words.itemsize > 1:
        split = getattr(library, f"split_{words.itemsize}")
        split(address(words), len(words), address(planes), planes.strides[0])
        return
    if words.itemsize == 1:
        planes[0] = words
        return
    # Narrowing keeps the lower half, and takes a fifth of the time of a strided copy.
    middle = words.itemsize // 2
    split_planes(words.astype(f"u{middle}"), planes[:middle])
    np.right_shift(words, 8 * middle, out=words)
    split_planes(words.astype(f"u{middle}"), planes[middle:])


def join_planes(planes: Sequence[np.ndarray], words: np.ndarray) -> None:
    """Fill contiguous words, 1-D, with their bytes of each significance, lowest first."""
    library = compiled()
    if library and words.itemsize in (2, 4):
        pointers = (ctypes.c_void_p * len(planes))(*map(address, planes))
        getattr(library, f"join_{words.itemsize}")(pointers, len(words), address(words))
        return
    if words.itemsize == 1:
        words.view(np.uint8)[:] = planes[0]
        return
    # Shifting whole halves takes three quarters of the time of strided copies, half for words of two bytes.
    middle = words.itemsize // 2
    low, high = _joined(planes[:middle]), _joined(planes[middle:])
    unsigned = words.view(f"u{words.itemsize}")
    np.left_shift(high, 8 * middle, out=unsigned, dtype=unsigned.dtype)
    np.bitwise_or(unsigned, low, out=unsigned)


def _joined(planes: Sequence[np.ndarray]) -> np.ndarray:
    if len(planes) == 1:
        return planes[0]
    words = np.empty(len(planes[0]), f"u{len(planes)}")
    join_planes(planes, words)
    return words


def _is_rotated(words: np.ndarray, dtype: torch.dtype) -> bool:
    return words.itemsize > 1 and (dtype.is_floating_point or dtype.is_complex)
