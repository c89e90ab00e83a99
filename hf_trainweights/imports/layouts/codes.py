"""Codes as other quantizers pack them: streams of bits, planes of bits, and two codes in a byte."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_trainweights.formats.group_scales import unpack_bits

# Rows are unpacked in blocks of this many codes, because each takes eight bytes for a while.
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


def unpack_planar(words: Tensor, bits: int) -> Tensor:
    """Unpack codes of 2 to 8 bits as GPTQModel's `gptq_p` has them: 32 codes in `bits` words, plane by plane.

    The first plane has the lowest bits of all codes, as many as the largest power of two in `bits`.

    Args:
        words: int32 words, `[*, K / 32 * bits]`.
        bits: Bits of a code.

    Returns:
        uint8 codes, `[*, K]`.
    """
    blocks = words.unflatten(-1, (-1, bits))
    codes = torch.zeros((*blocks.shape[:-1], 32), dtype=torch.uint8, device=words.device)
    start = 0
    for width in (8, 4, 2, 1):
        if bits & width:
            plane = unpack_stream(blocks[..., start : start + width], width)
            codes |= plane << start
            start += width
    return codes.flatten(-2)


def swap_nibbles(octets: Tensor) -> Tensor:
    """Exchange the two codes of each byte."""
    return (octets << 4) | (octets >> 4)
