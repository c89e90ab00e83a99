"""Codes as other quantizers pack them: streams of bits, and two codes in a byte."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_trainweights.formats.group_scales import unpack_bits

# Rows are unpacked in blocks of so many codes, because each takes eight bytes for a while.
_BLOCK_CODES = 1 << 22


def unpack_stream(words: Tensor, bits: int) -> Tensor:
    """Unpack codes of 2 to 8 bits that follow each other without gaps, the first in the lowest bits.

    Args:
        words: int32 or uint32 words, or bytes; their last dimension has a multiple of 8 codes.
        bits: Bits of a code.

    Returns:
        uint8 codes, `[*, K]`.

    Examples:
        >>> unpack_stream(torch.tensor([[0x76543210]], dtype=torch.int32), 4).tolist()
        [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    if 8 % bits == 0:
        fields = [(octets >> start) & (2**bits - 1) for start in range(0, 8, bits)]
        return torch.stack(fields, dim=-1).flatten(-2)
    count = octets.shape[-1] * 8 // bits
    rows = octets.reshape(-1, octets.shape[-1])
    blocks = rows.split(max(1, _BLOCK_CODES // max(1, count)))
    codes = [unpack_bits(block, bits, count).to(torch.uint8) for block in blocks]
    return torch.cat(codes).view(*octets.shape[:-1], count)


def swap_nibbles(octets: Tensor) -> Tensor:
    """Exchange the two codes of each byte."""
    return (octets << 4) | (octets >> 4)
