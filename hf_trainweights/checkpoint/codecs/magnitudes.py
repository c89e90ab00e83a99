"""`planes-magnitudes`: exact, for states of an optimizer, whose magnitudes follow those of their rows and columns.

It is `planes-rank1` (see `exact`) with other codes. The means, payloads and tiles are the same, and r + c, the mean of
the element's row and column, predicts log2 of its magnitude. Means of gradients have codes, too, because a code keeps
the sign. It is not zigzag coded: magnitudes lie further below their means than above, so the sign of a difference says
something about its size.

    change = (bits without the sign) - prediction + (LOW << m)         m mantissa bits of the dtype
    code = (2 * change + sign) << SPARE, or change << SPARE            change is 0 if the magnitude is 0

The flag of a tile says which code it has. The first one in this table that has a code for each element is taken:

| flag | dtype | sign | LOW | SPARE | octaves that a change covers |
|---|---|---|---|---|---|
| 2 | float32, bfloat16 | none, all are positive | 24 | 4 | 32 |
| 1 | float32, bfloat16 | is kept | 50 | 2 | 64 |
| 1 | float16 | is kept | 24 | 0 | 32 |
| 0 | | stored as by `planes` | | | |

SPARE moves bits of the mantissa into the highest byte, because a Huffman coder wastes a tenth of a bit on a few
frequent symbols. Then as many of the lowest bits of a code are 0. So the lowest plane has 8 - SPARE bits in each byte,
all of them noise, and its block is packed: with SPARE of 2 four bytes become three, with 4 two become one (`pack_bytes`
in files/native/planes.c specifies their order).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from hf_trainweights.checkpoint.codecs.base import ROLES
from hf_trainweights.checkpoint.codecs.coding.blocks import BlockReader, BlockWriter, scratch
from hf_trainweights.checkpoint.codecs.coding.rank1 import MANTISSA_BITS
from hf_trainweights.checkpoint.codecs.exact import PlanesRank1
from hf_trainweights.files.byte_planes import compiled, compiled_for, join_planes, split_planes


class _Layout(NamedTuple):
    """How numbers become codes; see the table above."""

    is_signed: bool
    low: int
    spare: int


_WIDE = {2: _Layout(is_signed=False, low=24, spare=4), 1: _Layout(is_signed=True, low=50, spare=2)}
# By dtype and flag.
_LAYOUTS = {torch.float32: _WIDE, torch.bfloat16: _WIDE, torch.float16: {1: _Layout(is_signed=True, low=24, spare=0)}}
# Bytes that are packed together.
_GROUP = 256


@dataclass(frozen=True)
class PlanesMagnitudes(PlanesRank1):
    """Codes byte planes of magnitudes relative to means of rows and columns; bit-exact for any number."""

    codec_id: ClassVar[str] = "planes-magnitudes"
    roles: ClassVar[tuple[str, ...]] = ROLES
    # An eighth of an octave: finer means take more bytes than they save.
    _multiple: ClassVar[int] = 16

    @staticmethod
    def _codes(words: np.ndarray, dtype: torch.dtype, rows: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, int]:
        codes = scratch("codes", words.shape, words.dtype)
        has_sign = bool((words.reshape(-1)[: words.shape[1]] < 0).any())  # the first row tells it of most tensors
        for flag, layout in _LAYOUTS[dtype].items():
            if (layout.is_signed or not has_sign) and _encode(
                words, layout, _lowest(layout, dtype, rows), columns, codes
            ):
                return codes, flag
        return codes, 0

    @classmethod
    def _undo_(cls, codes: np.ndarray, dtype: torch.dtype, flag: int, rows: np.ndarray, columns: np.ndarray) -> None:
        is_signed, _, spare = layout = _LAYOUTS[dtype][flag]
        lowest = _lowest(layout, dtype, rows)
        if function := compiled_for("absolute", codes):
            function(codes, lowest, columns, *codes.shape, is_signed, spare)
            return
        unsigned, sign_bit = codes.view(f"u{codes.itemsize}"), 8 * codes.itemsize - 1
        unsigned >>= spare
        changes = unsigned >> is_signed
        magnitudes = changes + lowest.view(unsigned.dtype) + columns.view(unsigned.dtype)
        magnitudes &= np.iinfo(codes.dtype).max
        magnitudes *= changes != 0
        np.bitwise_or(magnitudes, (unsigned & is_signed) << sign_bit, out=unsigned)

    @staticmethod
    def _write(writer: BlockWriter, codes: np.ndarray, dtype: torch.dtype, flag: int) -> None:
        planes, spare = scratch("planes", [codes.itemsize, len(codes)], np.uint8), _LAYOUTS[dtype][flag].spare
        split_planes(codes, planes)
        for significance, plane in enumerate(planes):
            writer.write(_packed(plane, spare) if significance == 0 and spare else plane)

    @classmethod
    def _read(cls, reader: BlockReader, first_block: int, codes: np.ndarray, dtype: torch.dtype, flag: int) -> None:
        if flag not in _LAYOUTS[dtype]:
            raise cls.corrupt("flag of a tile", f"0 or one of {', '.join(map(str, _LAYOUTS[dtype]))}", str(flag))
        spare, count = _LAYOUTS[dtype][flag].spare, len(codes)
        sizes = [_packed_bytes(count, spare) if spare else count] + [count] * (codes.itemsize - 1)
        planes = [reader.read(first_block + significance, size) for significance, size in enumerate(sizes)]
        if spare:
            planes[0] = _unpacked(planes[0], count, spare)
        join_planes(planes, codes)


def _lowest(layout: _Layout, dtype: torch.dtype, rows: np.ndarray) -> np.ndarray:
    """Lower the predictions of rows by LOW octaves, so that a change of 1 is the smallest one."""
    return rows - rows.dtype.type(layout.low << MANTISSA_BITS[dtype])


def _encode(words: np.ndarray, layout: _Layout, lowest: np.ndarray, columns: np.ndarray, codes: np.ndarray) -> bool:
    """Fill `codes` with those of a contiguous matrix, and return whether each of its words has one."""
    is_signed, _, spare = layout
    if function := compiled_for("relative", words):
        return not function(words, lowest, columns, *words.shape, is_signed, spare, codes)
    unsigned, sign_bit = words.view(f"u{words.itemsize}"), 8 * words.itemsize - 1
    magnitudes, signs = unsigned & np.iinfo(words.dtype).max, unsigned >> sign_bit
    changes = magnitudes - lowest.view(unsigned.dtype) - columns.view(unsigned.dtype)
    largest = np.iinfo(unsigned.dtype).max >> (spare + is_signed)
    misfits = (changes - 1 >= largest) & (magnitudes != 0)
    changes *= magnitudes != 0
    codes[:] = ((changes << is_signed | signs) << spare).view(words.dtype)
    return not misfits.any() and (is_signed or not signs.any())


def _packed_bytes(count: int, spare: int) -> int:
    """Return the bytes that `count` bytes with so many spare bits take."""
    parts = 8 // spare
    return (count // _GROUP * (_GROUP // parts) + -(-(count % _GROUP) // parts)) * (parts - 1)


def _packed(plane: np.ndarray, spare: int) -> np.ndarray:
    """Pack bytes whose lowest bits are 0, uint8 [n], into scratch."""
    packed = scratch("packed", [_packed_bytes(len(plane), spare)], np.uint8)
    if library := compiled():
        library.pack_bytes(plane, len(plane), spare, packed)
        return packed
    start, parts = 0, 8 // spare
    for group, size in _groups(len(plane)):
        filled = np.zeros([parts, -(-size // parts)], np.uint8)
        filled.reshape(-1)[:size] = plane[group : group + size]
        filled[:-1] |= filled[-1] >> _shifts(spare) & ((1 << spare) - 1)
        packed[start : start + filled[:-1].size] = filled[:-1].reshape(-1)
        start += filled[:-1].size
    return packed


def _unpacked(packed: np.ndarray, count: int, spare: int) -> np.ndarray:
    """Undo `_packed` for a plane of `count` bytes, into scratch."""
    plane = scratch("unpacked", [count], np.uint8)
    if library := compiled():
        library.unpack_bytes(packed, count, spare, plane)
        return plane
    start, parts, low = 0, 8 // spare, (1 << spare) - 1
    for group, size in _groups(count):
        stored = packed[start : start + -(-size // parts) * (parts - 1)].reshape(parts - 1, -1)
        last = np.bitwise_or.reduce((stored & low) << _shifts(spare), axis=0)
        plane[group : group + size] = np.concatenate([(stored & ~np.uint8(low)).reshape(-1), last])[:size]
        start += stored.size
    return plane


def _shifts(spare: int) -> np.ndarray:
    """Return by how many bits the last part of a group is shifted for each other part, uint8 [parts - 1, 1]."""
    return np.arange(spare, 8, spare, dtype=np.uint8)[:, None]


def _groups(count: int) -> list[tuple[int, int]]:
    """Return the first byte and the size of each group of a plane."""
    return [(start, min(_GROUP, count - start)) for start in range(0, count, _GROUP)]
