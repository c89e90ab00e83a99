"""Scales of groups in 6 bits each: steps of about 1/8 octave below one scale of the whole row.

    group scale = row scale * FACTORS[code]

Code 63 is the row scale itself, code 1 is 1/234 of it, and code 0 stands for a group of zeros. A factor has 8 bits of
mantissa, so that its product with a 16-bit row scale is exact in float32. Codes are packed along the row, least
significant bit first, and a row is padded with zero bits to whole bytes.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_trainweights.formats.unpacked import fields_of, look_up

SCALE_BITS = 6
_CODES = 1 << SCALE_BITS
_LARGEST_CODE = _CODES - 1

# 2**(i / 8) in 8 bits, times 128.
_EIGHTHS = (128, 140, 152, 166, 181, 197, 215, 235)

# By code, ascending.
FACTORS = (0.0, *(_EIGHTHS[step % 8] / 128 * 2.0 ** (step // 8 - 8) for step in range(2, _CODES + 1)))
_POWERS = torch.tensor([2.0**power for power in range(8)], device="cpu")
_BORDERS = tuple((low + high) / 2 for low, high in itertools.pairwise(FACTORS))


def encode_group_scales(scale: Tensor, row_scale: Tensor) -> Tensor:
    """Return the code of each group's scale: that of the nearest factor, of the smaller one in a tie.

    Args:
        scale: Float32 `[*, G]`, 0 for a group of zeros, else at least 2**-126.
        row_scale: `[*, 1]`, any float dtype, 0 for a row of zeros.

    Returns:
        New uint8 codes `[*, G]`: 1 to 63, and 0 only where the scale is 0.
    """
    ratio = scale / row_scale.float()
    codes = torch.bucketize(ratio, torch.tensor(_BORDERS, device=scale.device)).clamp_(1, _LARGEST_CODE)
    return codes.masked_fill_(scale == 0, 0).to(torch.uint8)


def decode_group_scales(codes: Tensor, row_scale: Tensor) -> Tensor:
    """Return the scales that codes stand for.

    Args:
        codes: `[*, G]`, any integer dtype, 0 to 63.
        row_scale: `[*, 1]`, any float dtype.

    Returns:
        New float32 scales `[*, G]`, exact for a 16-bit row scale, else rounded once.
    """
    return torch.tensor(FACTORS, device=codes.device)[codes.to(torch.int32)] * row_scale.float()


def packed_bytes(count: int, bits: int) -> int:
    """Return how many bytes a row of codes takes.

    Args:
        count: Codes of a row.
        bits: Bits of a code.
    """
    return -(-count * bits // 8)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack codes along the last dimension, least significant bit first, each row padded to whole bytes.

    Args:
        codes: Any integer dtype, `[*, n]`, each 0 to 2**bits - 1.
        bits: Bits of a code, 1 to 7.

    Returns:
        A new uint8 tensor `[*, packed_bytes(n, bits)]`.

    Examples:
        >>> pack_bits(torch.tensor([[1, 2, 3, 63]]), 6).tolist()
        [[129, 48, 252]]
    """
    count = codes.shape[-1]
    eights = F.pad(codes.to(torch.int64), (0, -count % 8)).unflatten(-1, (-1, 8))
    words = (eights << torch.arange(0, 8 * bits, bits, device=codes.device)).sum(dim=-1)
    # Little-endian, as are all numbers in files: the first `bits` of the eight bytes hold eight codes.
    octets = words.unsqueeze(-1).view(torch.uint8)[..., :bits].flatten(-2)
    return octets[..., : packed_bytes(count, bits)].contiguous()


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpack codes along the last dimension, the inverse of `pack_bits`.

    Args:
        packed: Uint8, `[*, packed_bytes(count, bits)]`.
        bits: Bits of a code, 1 to 7.
        count: Codes of a row.

    Returns:
        A new int64 tensor `[*, count]`.

    Examples:
        >>> unpack_bits(torch.tensor([[129, 48, 252]], dtype=torch.uint8), 6, 4).tolist()
        [[1, 2, 3, 63]]
    """
    octets = F.pad(packed, (0, -packed.shape[-1] % bits)).unflatten(-1, (-1, bits))
    words = F.pad(octets, (0, 8 - bits)).view(torch.int64)
    codes = (words >> torch.arange(0, 8 * bits, bits, device=packed.device)) & ((1 << bits) - 1)
    return codes.flatten(-2)[..., :count]


def codes_of_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpack codes as `unpack_bits` does, by ops that every exporter of PyTorch writes.

    Args:
        packed: Uint8, `[*, packed_bytes(count, bits)]`.
        bits: Bits of a code, 1 to 7.
        count: Codes of a row.

    Returns:
        New float32 `[*, count]`.
    """
    # A code lies in one byte or across two.
    starts = torch.arange(0, count * bits, bits, device=packed.device)
    octets = F.pad(packed.to(torch.float32), (0, 1))
    pairs = octets.index_select(-1, starts >> 3) + 256 * octets.index_select(-1, (starts >> 3) + 1)
    return fields_of(torch.floor(pairs / look_up(_POWERS, starts & 7)), 0, bits, width=16)
