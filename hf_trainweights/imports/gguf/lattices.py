"""GGUF's IQ3 kinds: four neighbouring weights are a point of a lattice, and each weight is one of eight magnitudes.

So a weight is one of sixteen values with a sign, which `table4` holds: 4.25 bits instead of 3.44 (IQ3_S) and 3.06
(IQ3_XXS). The scale of a group is an odd number times the float16 of its superblock, as in IQ4_XS.

| | bytes of a superblock |
|---|---|
| IQ3_S | float16, 64 low bits of indices, 8 ninth bits, 32 signs, 4 with two scales each |
| IQ3_XXS | float16, 64 indices, 32: for each group of 32 weights four numbers of sign patterns and a scale |

Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.formats.packing import pack_int4

# The magnitudes of the lattices by their numbers. IQ3_XXS's are a quarter of ggml's here, and its scales four times.
_ODD = torch.arange(1, 16, 2, dtype=torch.float32, device="cpu")
_XXS = torch.tensor([1, 3, 5, 7, 9, 11, 13, 15.5], dtype=torch.float32, device="cpu")
IQ3_S_VALUES, IQ3_XXS_VALUES = torch.cat([_ODD, -_ODD]), torch.cat([_XXS, -_XXS])


@cache
def _lattice(name: str) -> Tensor:
    """Return the numbers of the magnitudes of each point of a lattice, uint8 `[points, 4]`."""
    kind = _kind(name)
    kind.init_grid()
    magnitudes = torch.tensor(kind.grid_map, dtype=torch.float32, device="cpu")
    points = torch.from_numpy(np.array(kind.grid, dtype=np.float32)).view(-1, 4)
    return (points.unsqueeze(-1) == magnitudes).to(torch.uint8).argmax(-1).to(torch.uint8)


@cache
def _sign_patterns() -> Tensor:
    """Return the eight signs of each pattern, uint8 `[128, 8]`."""
    return _bits(torch.frombuffer(bytearray(_kind("IQ2_XXS").ksigns), dtype=torch.uint8))


def _kind(name: str) -> Any:
    # Only a file of such a kind needs the package gguf at this moment.
    from gguf import quants

    return getattr(quants, name)


def _bits(octets: Tensor) -> Tensor:
    """Return the bits of bytes, uint8 `[*, 8]`, the lowest first."""
    return (octets.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)).bitwise_and_(1)


def decode_iq3_s(blocks: Tensor) -> dict[str, Tensor]:
    """Return the stored tensors of rows of IQ3_S, uint8 `[n, superblocks, 110]`."""
    points = blocks[..., 2:66].int() | _bits(blocks[..., 66:74]).flatten(-2).int() << 8
    numbers = _lattice("IQ3_S").index_select(0, points.flatten()).view(*blocks.shape[:2], 256)
    signs = _bits(blocks[..., 74:106]).flatten(-2)
    scales = blocks[..., 106:110]
    return _stored(blocks, numbers, signs, torch.stack([scales & 15, scales >> 4], dim=-1).flatten(-2))


def decode_iq3_xxs(blocks: Tensor) -> dict[str, Tensor]:
    """Return the stored tensors of rows of IQ3_XXS, uint8 `[n, superblocks, 98]`."""
    numbers = _lattice("IQ3_XXS").index_select(0, blocks[..., 2:66].flatten().int()).view(*blocks.shape[:2], 256)
    words = blocks[..., 66:98].contiguous().view(torch.int32)
    patterns = (words.unsqueeze(-1) >> torch.tensor([0, 7, 14, 21], dtype=torch.int32)).bitwise_and_(127)
    signs = _sign_patterns().index_select(0, patterns.flatten()).view(numbers.shape)
    return _stored(blocks, numbers, signs, (words >> 28).bitwise_and_(15).to(torch.uint8))


def _stored(blocks: Tensor, numbers: Tensor, signs: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Return the stored tensors for the numbers of magnitudes, signs, and four-bit scales `[n, superblocks, 8]`."""
    codes = numbers.bitwise_or(signs.bitwise_left_shift(3))
    # IQ4_XS's scale is a number of six bits, less 32: bytes with the two high bits of four groups, then four of two.
    six_bits = (scales * 2 + 33).unflatten(-1, (-1, 2))
    low = six_bits[..., 0].bitwise_and(15) | six_bits[..., 1].bitwise_and(15) << 4
    pairs = (six_bits[..., 0] >> 4 | six_bits[..., 1] >> 4 << 2).unflatten(-1, (-1, 2))
    group_scale = torch.cat([pairs[..., 0] | pairs[..., 1] << 4, low], dim=-1)
    return {
        "qdata": pack_int4(codes.flatten(1).view(torch.int8) - 8),
        "scale": blocks[..., :2].contiguous().view(torch.float16).flatten(1),
        "group_scale": group_scale.flatten(1),
    }
