"""Group scales of 6 bits each, in steps of about 1/8 octave below one scale for the row.

    group scale = row scale * FACTORS[code]

Code 63 is the row scale itself, code 1 is 1/234 of it, and code 0 stands for a group of zeros. A factor has 8 bits of
mantissa, so that the factor times a 16-bit row scale is exact in float32. Codes are packed along the row, least
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

# The factor of each code, ascending.
FACTORS = (0.0, *(_EIGHTHS[step % 8] / 128 * 2.0 ** (step // 8 - 8) for step in range(2, _CODES + 1)))
_POWERS = torch.tensor([2.0**power for power in range(8)], dtype=torch.float32, device="cpu")
_BORDERS = tuple((low + high) / 2 for low, high in itertools.pairwise(FACTORS))


def encode_group_scales(scale: Tensor, row_scale: Tensor) -> Tensor:
    """Return the code of each scale's nearest factor, uint8 `[*, G]`; the smaller factor wins a tie, only 0 gets 0."""
    ratio = scale / row_scale.float()
    borders = torch.tensor(_BORDERS, dtype=torch.float32, device=scale.device)
    codes = torch.bucketize(ratio, borders).clamp_(1, _LARGEST_CODE)
    return codes.masked_fill_(scale == 0, 0).to(torch.uint8)


def decode_group_scales(codes: Tensor, row_scale: Tensor) -> Tensor:
    """Return the float32 scales `[*, G]` of codes: exact for a 16-bit row scale `[*, 1]`, else rounded once."""
    factors = torch.tensor(FACTORS, dtype=torch.float32, device=codes.device)
    return factors[codes.to(torch.int32)] * row_scale.float()


def packed_bytes(count: int, bits: int) -> int:
    """Return the number of bytes that a row of codes takes."""
    return -(-count * bits // 8)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack codes `[*, n]` of 1 to 7 bits into uint8, least significant bit first, each row padded to whole bytes.

    Examples:
        >>> pack_bits(torch.tensor([[1, 2, 3, 63]]), 6).tolist()
        [[129, 48, 252]]
    """
    count = codes.shape[-1]
    eights = F.pad(codes.to(torch.int64), (0, -count % 8)).unflatten(-1, (-1, 8))
    words = (eights << torch.arange(0, 8 * bits, bits, device=codes.device)).sum(dim=-1)
    # Little-endian, as are all numbers in files. Eight codes fill the first `bits` bytes of the word's eight bytes.
    octets = words.unsqueeze(-1).view(torch.uint8)[..., :bits].flatten(-2)
    return octets[..., : packed_bytes(count, bits)].contiguous()


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpack `count` codes of each row, the inverse of `pack_bits`, as int64."""
    octets = F.pad(packed, (0, -packed.shape[-1] % bits)).unflatten(-1, (-1, bits))
    words = F.pad(octets, (0, 8 - bits)).view(torch.int64)
    codes = (words >> torch.arange(0, 8 * bits, bits, device=packed.device)) & ((1 << bits) - 1)
    return codes.flatten(-2)[..., :count]


def codes_of_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpack as `unpack_bits` does, to float32, with ops that every exporter of PyTorch can write."""
    # A code lies in one byte or across two.
    starts = torch.arange(0, count * bits, bits, device=packed.device)
    octets = F.pad(packed.to(torch.float32), (0, 1))
    pairs = octets.index_select(-1, starts >> 3) + 256 * octets.index_select(-1, (starts >> 3) + 1)
    return fields_of(torch.floor(pairs / look_up(_POWERS, starts & 7)), 0, bits, width=16)
