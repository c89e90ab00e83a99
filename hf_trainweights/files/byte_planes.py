"""The bytes of tensors on their way through zstd's Huffman coder: words, planes and blocks.

A word is a component of a tensor as an integer. A plane holds the bytes of equal significance of many words. A block is
a plane, or a part of one, that is coded by itself. The bits of a floating point word are rotated left by one, so that
the exponent fills the top byte and the sign becomes the lowest bit: mantissas are noise, but exponents repeat.

The bytes of tensors hold next to no repeats but runs of zeros, so zstd is told not to look for others. If the entropy
of single bytes is above 3 bits, the result is within 1 % of it. zstd's own levels are slower and give no smaller files.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import zstandard
from torch import Tensor

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.native_library import load_library

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_LIBRARY = Path(__file__).parent / "native" / "planes.so"
_ABI = 4
# The C functions for words of 2 and of 4 bytes, each with the types of its result and arguments in the letters of
# `load_library`. From `add` on they serve the codecs of checkpoints (`checkpoint/codecs/exact.py`), and planes.c
# describes them. Words of 8 bytes, which are rare, are only split: numpy is fast enough for the rest.
_FOR_WORDS = {
    "split": "-alial",  # returns nothing, and takes an array, a long, an int, an array and a long
    "join": "-plia",
    "add": "-aal",
    "subtract_sums": "-aaalla",
    "add_sums": "-aaall",
    "relative": "laaalliia",
    "absolute": "-aaallii",
}
_FOR_BYTES = {"split_8": "-alial", "pack_bytes": "-alia", "unpack_bytes": "-alia"}
_FUNCTIONS = {f"{name}_{size}": types for name, types in _FOR_WORDS.items() for size in (2, 4)} | _FOR_BYTES

_HUFFMAN_ONLY = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    min_match=7,
    hash_log=6,
    chain_log=6,
    window_log=17,
    search_log=1,
    target_length=0,
    write_content_size=True,
)
# A frame takes at least this many bytes, so shorter blocks are not coded.
_SMALLEST_FRAME = 12
# A frame that is decoded at once needs no window. This bound refuses a frame that claims a huge one.
_MAX_WINDOW_BYTES = 1 << 22


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """Return the C functions of `native/`, several times as fast as numpy; None if they are not compiled."""
    return load_library(_LIBRARY, _FUNCTIONS, _ABI)


def compiled_for(name: str, words: np.ndarray) -> Callable[..., None] | None:
    """Return the C function `name` for words of this size, 2 or 4 bytes; None if there is no such function."""
    library = compiled() if words.itemsize in (2, 4) else None
    return library and getattr(library, f"{name}_{words.itemsize}")


def word_layout(shape: torch.Size, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of a component and the number of components; a complex number has two components."""
    itemsize = dtype.to_real().itemsize if dtype.is_complex else dtype.itemsize
    return itemsize, shape.numel() * dtype.itemsize // itemsize


def words_of(tensor: Tensor) -> np.ndarray:
    """Return the components of a contiguous tensor as integers, in a 1-D view."""
    return tensor.reshape(-1).view(WORDS[word_layout(tensor.shape, tensor.dtype)[0]]).numpy()


def fold(words: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return a copy of the words; words of a float dtype are rotated left by one bit."""
    if not _is_rotated(words, dtype):
        return words.copy()
    # The arithmetic shift gives 0 or -1, and the left shift an even number: subtracting sets the lowest bit.
    folded = words << 1
    folded -= words >> (8 * words.itemsize - 1)
    return folded


def split_planes(words: np.ndarray, planes: np.ndarray, folded: torch.dtype | None = None) -> None:
    """Fill `planes`, [itemsize, len(words)], with the bytes of contiguous words, or of `fold(words, folded)`."""
    library, is_rotated = compiled(), folded is not None and _is_rotated(words, folded)
    if library and words.itemsize > 1:
        getattr(library, f"split_{words.itemsize}")(words, len(words), is_rotated, planes, planes.strides[0])
    else:
        to_split = words if folded is None else fold(words, folded)
        planes[:] = to_split.view(np.uint8).reshape(-1, words.itemsize).T


def join_planes(planes: Sequence[np.ndarray], words: np.ndarray, folded: torch.dtype | None = None) -> None:
    """Fill contiguous 1-D words from their planes, lowest bytes first, the inverse of `split_planes`.

    If `folded` is a dtype, the planes are those of `fold(words, folded)`, and this undoes the folding too.
    """
    function, is_rotated = compiled_for("join", words), folded is not None and _is_rotated(words, folded)
    if function is not None:
        pointers = (ctypes.c_void_p * len(planes))(*(plane.__array_interface__["data"][0] for plane in planes))
        function(ctypes.addressof(pointers), len(words), is_rotated, words)
        return
    for significance, plane in enumerate(planes):
        words.view(np.uint8)[significance :: words.itemsize] = plane
    if is_rotated:
        unsigned = words.view(f"u{words.itemsize}")
        sign = unsigned << (8 * words.itemsize - 1)
        np.right_shift(unsigned, 1, out=unsigned)
        np.bitwise_or(unsigned, sign, out=unsigned)


def _is_rotated(words: np.ndarray, dtype: torch.dtype) -> bool:
    return words.itemsize > 1 and (dtype.is_floating_point or dtype.is_complex)


class _Coders(threading.local):
    """zstd's contexts of a thread. Making one takes as long as coding a small tensor; two threads may not share one."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_HUFFMAN_ONLY)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)


_coders = _Coders()


def encode_block(block: np.ndarray) -> np.ndarray:
    """Return a block, 1-D contiguous uint8, as one standard zstd frame if that is shorter, else the block itself."""
    if len(block) < _SMALLEST_FRAME:
        return block
    coded = _coders.compressor.compress(memoryview(block))  # pyright: ignore[reportArgumentType] (see `decode_block`)
    return np.frombuffer(coded, np.uint8) if len(coded) < len(block) else block


def decode_block(stored: np.ndarray, size: int, corrupt: Callable[[str, str], CorruptFileError]) -> np.ndarray:
    """Undo `encode_block`: return read-only uint8 `[size]`. No frame, not even a forged one, makes it allocate more."""
    if len(stored) == size:
        return stored
    frame = memoryview(stored)  # pyright: ignore[reportArgumentType] (numpy 2 has no __buffer__ in 3.11)
    expected = f"a frame of {size} bytes"
    try:
        if len(frame) < size == zstandard.frame_content_size(frame):
            return np.frombuffer(_coders.decompressor.decompress(frame, allow_extra_data=False), np.uint8)
    except zstandard.ZstdError as error:
        raise corrupt(expected, str(error)) from error
    raise corrupt(expected, f"{len(frame)} bytes of another")
