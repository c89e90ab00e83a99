"""Blocks of bytes through zstd's Huffman coder, for files of weights and of training state alike.

The bytes of tensors hold next to no repeats but runs of zeros, so zstd is told not to look for others. That is within
1 % of the order-0 entropy above 3 bits a byte; zstd's own levels are slower and no smaller.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import zstandard

from hf_trainweights.errors import CorruptFileError

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
# Fewer bytes than a frame takes are not worth a try.
_SMALLEST_FRAME = 12
# A frame needs no window of its own when it is decoded at once; this stops one that claims a huge window.
_MAX_WINDOW_BYTES = 1 << 22


class _Coders(threading.local):
    """zstd's contexts: making them takes as long as coding a small tensor, and no two threads may share one."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_HUFFMAN_ONLY)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)


_coders = _Coders()


def encode_block(block: np.ndarray) -> np.ndarray:
    """Return a block, 1-D contiguous uint8, as one standard zstd frame where that is shorter, else the block itself."""
    if len(block) < _SMALLEST_FRAME:
        return block
    coded = _coders.compressor.compress(memoryview(block))  # pyright: ignore[reportArgumentType] (see `decode_block`)
    return np.frombuffer(coded, np.uint8) if len(coded) < len(block) else block


def decode_block(stored: np.ndarray, size: int, corrupt: Callable[[str, str], CorruptFileError]) -> np.ndarray:
    """Undo `encode_block`: return uint8 `[size]`, not to be written to; no frame can make it allocate more."""
    if len(stored) == size:
        return stored
    frame = memoryview(stored)  # pyright: ignore[reportArgumentType] (numpy 2 has no __buffer__ in 3.11)
    if len(frame) > size or _frame_bytes(frame) != size:
        raise corrupt(f"a frame of {size} bytes", f"{len(frame)} bytes of another")
    try:
        block = _coders.decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise corrupt("a whole zstd frame", str(error)) from error
    if len(block) != size:
        raise corrupt(f"{size} bytes", f"{len(block)} bytes")
    return np.frombuffer(block, np.uint8)


def _frame_bytes(frame: memoryview) -> int:
    """Return the size that a zstd frame says it decodes to, or -1 if it says none or is no frame."""
    try:
        return zstandard.frame_content_size(frame)
    except zstandard.ZstdError:
        return -1
