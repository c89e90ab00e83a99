"""Packing of codes of 2 to 6 bits: a group of 32 columns takes as many int32 words as a code has bits.

A code is cut into planes of 4, 2 and 1 bits, the widest with the lowest bits first: 6 = 4 + 2, 5 = 4 + 1, 3 = 2 + 1.
A plane of p bits takes p words, which is 4p bytes. Bits `p * i` up to `p * i + p - 1` of its byte j belong to column
`4 * p * i + j`. So one shift and one mask of whole words yield neighbouring columns, four to a word.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hf_trainweights.errors import QuantizationError
from hf_trainweights.formats.unpacked import fields_of

COLUMNS = 32
"""The number of columns whose codes share words."""


def pack_planes(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes `[*, K]` into int32 `[*, K // 32 * bits]`; QuantizationError: 32 does not divide K.

    Examples:
        >>> [f"{word & 0xFFFFFFFF:08X}" for word in pack_planes(torch.arange(32, dtype=torch.uint8) % 4, 2).tolist()]
        ['FFAA5500', 'FFAA5500']
    """
    *lead, K = codes.shape
    if K % COLUMNS:
        raise QuantizationError("codes", f"a multiple of {COLUMNS} columns to pack", f"{K}", "Use int8.")
    # Flat, because a tensor without columns, even a contiguous one, lacks the strides to be viewed as wider words.
    words = codes.flatten().view(torch.int32).view(*lead, K // COLUMNS, COLUMNS // 4)
    packed = words.new_zeros(*lead, K // COLUMNS, bits)
    for plane, start, fields, mask in _planes(bits):
        columns = words.unflatten(-1, (fields, plane))
        for field in range(fields):
            bits_of_field = (columns[..., field, :] >> start).bitwise_and_(mask)
            packed[..., start : start + plane].bitwise_or_(bits_of_field.bitwise_left_shift_(plane * field))
    return packed.flatten(-2)


def unpack_planes(packed: Tensor, bits: int) -> Tensor:
    """Unpack int32 words into uint8 codes `[*, K]`, the inverse of `pack_planes`."""
    *lead, count = packed.shape
    words = packed.unflatten(-1, (count // bits, bits))
    codes = words.new_empty(*words.shape[:-1], COLUMNS // 4)
    for plane, start, fields, mask in _planes(bits):
        columns = codes.unflatten(-1, (fields, plane))
        for field in range(fields):
            bits_of_field = (words[..., start : start + plane] >> plane * field).bitwise_and_(mask)
            if start:
                columns[..., field, :].bitwise_or_(bits_of_field.bitwise_left_shift_(start))
            else:
                columns[..., field, :] = bits_of_field
    return codes.flatten().view(torch.uint8).view(*lead, count // bits * COLUMNS)


def codes_of_planes(octets: Tensor, bits: int) -> Tensor:
    """Unpack as `unpack_planes` does, from bytes to float32, with ops that every exporter of PyTorch can write."""
    groups = octets.to(torch.float32).unflatten(-1, [octets.size(-1) // (4 * bits), 4 * bits])
    planes = []
    for plane, start, fields, _ in _planes(bits):
        plane_bytes = groups.narrow(-1, 4 * start, 4 * plane)
        values = torch.cat([fields_of(plane_bytes, plane * field, plane) for field in range(fields)], dim=-1)
        planes.append(values * 2**start if start else values)
    return torch.flatten(sum(planes[1:], planes[0]), -2)


def _planes(bits: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield for each plane its bits, its first bit in a code, its codes in a byte, and a mask of the lowest code.

    The first bit is also the number of the plane's first word among the words of 32 columns. The mask is for a word: it
    has the lowest code of each of its four bytes.
    """
    start = 0
    for plane in (4, 2, 1):
        if bits & plane:
            yield plane, start, 8 // plane, (2**plane - 1) * 0x01010101
            start += plane
