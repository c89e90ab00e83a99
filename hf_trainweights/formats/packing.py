"""Packing of sub-byte integers into int32 words: along K, least significant first, offset binary.

The layout of compressed-tensors' `pack-quantized`: word j of a row holds codes 8j to 8j + 7, code 8j + i in bits 4i to
4i + 3, each stored as code + 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_trainweights.errors import QuantizationError

CODES_PER_WORD = 8


def pack_int4(codes: Tensor) -> Tensor:
    """Pack signed 4-bit codes, eight to an int32 word.

    Args:
        codes: Any integer or float dtype holding -8 to 7, `[*, K]` with K a multiple of 8.

    Returns:
        A new int32 tensor `[*, K // 8]`.

    Raises:
        QuantizationError: K is not a multiple of 8.

    Example:
        >>> pack_int4(torch.tensor([[-8, -7, -6, -5, -4, -3, -2, -1]])).tolist()
        [[1985229328]]
    """
    if codes.shape[-1] % CODES_PER_WORD:
        raise QuantizationError(
            "codes", "a multiple of 8 columns to pack", f"{codes.shape[-1]}", "Pad the rows or use int8."
        )
    nibbles = (codes + 8).to(torch.uint8)
    octets = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    # Flat, because a view as wider words needs strides that even a contiguous tensor without columns does not have.
    return octets.flatten().view(torch.int32).view(*codes.shape[:-1], codes.shape[-1] // CODES_PER_WORD)


def unpack_int4(packed: Tensor) -> Tensor:
    """Unpack int32 words into signed 4-bit codes, the inverse of `pack_int4`.

    Args:
        packed: Int32, `[*, K // 8]`.

    Returns:
        A new int8 tensor `[*, K]` of values -8 to 7.

    Raises:
        QuantizationError: `packed` is not int32.

    Example:
        >>> unpack_int4(torch.tensor([[1985229328]], dtype=torch.int32)).tolist()
        [[-8, -7, -6, -5, -4, -3, -2, -1]]
    """
    if packed.dtype != torch.int32:
        raise QuantizationError("qdata", "packed torch.int32 words", f"{packed.dtype}", "Pack them with pack_int4.")
    octets = packed.contiguous().view(torch.uint8)
    codes = torch.stack((octets & 15, octets >> 4), dim=-1).view(torch.int8)
    return codes.sub_(8).flatten(-2)
