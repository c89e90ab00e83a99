"""Writes words as one block for each byte of significance, reads them, and finds the smaller of two codings."""

from __future__ import annotations

import numpy as np
import torch

from hf_trainweights.checkpoint.codecs.coding.blocks import BlockReader, BlockWriter, scratch
from hf_trainweights.files.byte_planes import fold, join_planes, split_planes

# Most words of a chunk that are compared to choose the smaller of two codings.
_SAMPLE = 4096


def sample_step(count: int) -> int:
    """Return every how many words one goes into a sample of at most 4096, enough to find the smaller of two codings."""
    return count // _SAMPLE + 1


def is_smaller(codes: np.ndarray, words: np.ndarray, dtype: torch.dtype) -> bool:
    """Return whether the codes of a tensor's words take fewer bits than the words themselves."""
    return _plane_bits(codes) < _plane_bits(fold(words, dtype))


def _plane_bits(words: np.ndarray) -> float:
    """Return the order-0 entropy of the byte planes, in bits per word."""
    planes = np.ascontiguousarray(words).view(np.uint8).reshape(-1, words.itemsize)
    # One call of bincount serves all planes: each plane has 256 numbers of its own.
    numbers = planes + np.arange(words.itemsize, dtype=np.uint16) * np.uint16(256)
    counts = np.bincount(numbers.reshape(-1))
    share = counts[counts > 0] / len(words)
    return -float(np.dot(share, np.log2(share)))


def write_planes(writer: BlockWriter, words: np.ndarray, folded: torch.dtype | None = None) -> None:
    """Write one block per byte of significance, lowest first.

    `words` are codes, or, if `folded` is the tensor's dtype, its words, which are rotated first.
    """
    planes = scratch("planes", [words.itemsize, len(words)], np.uint8)
    split_planes(words, planes, folded)
    for plane in planes:
        writer.write(plane)


def read_planes(reader: BlockReader, first_block: int, out: np.ndarray, folded: torch.dtype | None = None) -> None:
    """Undo `write_planes`: fill `out` from the blocks from `first_block` on; CorruptFileError: a block is damaged."""
    join_planes([reader.read(first_block + index, len(out)) for index in range(out.itemsize)], out, folded)
