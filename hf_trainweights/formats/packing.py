"""Packing of sub-byte integers into int32 words: along K, least significant first, offset binary.

This is the layout of compressed-tensors' `pack-quantized`: word j of a row holds codes 8j to 8j + 7. Code 8j + i is in
bits 4i to 4i + 3, stored as code + 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_trainweights.errors import QuantizationError

CODES_PER_WORD = 8


def pack_int4(codes: Tensor) -> Tensor:
    """Pack signed 4-bit codes `[*, K]`, eight to an int32 word; QuantizationError: 8 does not divide K.

    Examples:
        >>> pack_int4(torch.tensor([[-8, -7, -6, -5, -4, -3, -2, -1]])).tolist()
        [[1985229328]]
    """
    if codes.shape[-1] % CODES_PER_WORD:
        raise QuantizationError(
            "codes", "a multiple of 8 columns to pack", f"{codes.shape[-1]}", "Pad the rows or use int8."
        )
    # Flat, because a tensor without columns, even a contiguous one, lacks the strides to be viewed as wider words.
    nibbles = codes.to(torch.int8, copy=True).flatten().add_(8)
    # Each int16 holds two nibbles, one in each byte; the low byte of `pairs | pairs >> 4` holds both.
    pairs = nibbles.view(torch.int16)
    octets = (pairs >> 4).bitwise_or_(pairs).to(torch.int8)
    return octets.view(torch.int32).view(*codes.shape[:-1], codes.shape[-1] // CODES_PER_WORD)


def look_up_nibbles(packed: Tensor, table: Tensor) -> Tensor:
    """Replace each nibble of int32 words `[*, N, K // 8]` by its entry in a table; return `[*, N, K]` of its dtype.

    The table is `[16]` for all matrices, or `[*, 1, 16]` with one for each.
    """
    tables = table.reshape(-1, 16)
    # A byte has two values, that of its low bits first. The pairs of values of matrix i begin at 256 * i.
    octets = torch.arange(256, device=table.device)
    pairs = torch.stack([tables[:, octets & 15], tables[:, octets >> 4]], dim=-1).flatten(0, 1)
    *lead, count = packed.shape
    positions = packed.contiguous().view(torch.uint8).to(torch.int32)
    if len(tables) > 1:
        matrices = torch.arange(0, len(pairs), 256, dtype=torch.int32, device=table.device)
        positions += matrices.view(*lead[:-1], 1, 1)
    return pairs.index_select(0, positions.flatten()).view(*lead, count * CODES_PER_WORD)


def unpack_int4(packed: Tensor) -> Tensor:
    """Unpack int32 words `[*, K // 8]` into signed 4-bit codes, int8 `[*, K]`, the inverse of `pack_int4`."""
    if packed.dtype != torch.int32:
        raise QuantizationError("qdata", "packed torch.int32 words", f"{packed.dtype}", "Pack them with pack_int4.")
    pairs = packed.contiguous().view(torch.uint8).to(torch.int16)
    return (pairs << 4).bitwise_or_(pairs).bitwise_and_(0x0F0F).view(torch.int8).sub_(8)
