"""`planes-magnitudes`: exact, for states of an optimizer, whose magnitudes follow those of their rows and columns.

It is `planes-rank1` (see `exact`) with other codes. The means, payloads, tiles and flags are the same, and r + c, the
mean of the element's row and column, predicts log2 of its magnitude. The code keeps the sign, so gradients' means have
codes, too, and it is not zigzag coded: magnitudes lie further below their means than above, so the sign of a
difference says something about its size.

    change = (bits without the sign) - prediction + (LOW << m)         m mantissa bits of the dtype
    code = (2 * change + sign) << SPARE                                change is 0 if the magnitude is 0

| dtype | LOW | SPARE | octaves that a change covers |
|---|---|---|---|
| float32, bfloat16 | 50 | 2 | 64 |
| float16 | 24 | 0 | 32 |

If a change does not lie above 0 and within these octaves, the tile is stored as by `planes`. SPARE moves two bits of
the mantissa into the highest byte, because a Huffman coder wastes a tenth of a bit on a few frequent symbols. Then the
lowest two bits of a code are 0. So the lowest plane has six bits in each byte, and its block is packed: four bytes
become three (`pack_six` in files/native/planes.c specifies their order).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from hf_trainweights.checkpoint.codecs.base import ROLES
from hf_trainweights.checkpoint.codecs.coding.blocks import BlockReader, BlockWriter, scratch
from hf_trainweights.checkpoint.codecs.coding.rank1 import MANTISSA_BITS
from hf_trainweights.checkpoint.codecs.exact import PlanesRank1
from hf_trainweights.files.byte_planes import compiled, compiled_for, join_planes, split_planes

_LOW = {torch.float32: 50, torch.bfloat16: 50, torch.float16: 24}
_SPARE = {torch.float32: 2, torch.bfloat16: 2, torch.float16: 0}
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
    def _codes(words: np.ndarray, dtype: torch.dtype, rows: np.ndarray, columns: np.ndarray) -> np.ndarray | None:
        lowest, spare = _lowest(dtype, rows), _SPARE[dtype]
        if function := compiled_for("relative", words):
            codes = scratch("codes", words.shape, words.dtype)
            return None if function(words, lowest, columns, *words.shape, spare, codes) else codes
        unsigned, sign_bit = words.view(f"u{words.itemsize}"), 8 * words.itemsize - 1
        most = np.iinfo(words.dtype).max
        magnitudes = unsigned & most
        changes = magnitudes - lowest.view(unsigned.dtype) - columns.view(unsigned.dtype)
        if ((changes - 1 >= most >> spare) & (magnitudes != 0)).any():
            return None
        changes *= magnitudes != 0
        return ((changes << 1 | unsigned >> sign_bit) << spare).view(words.dtype)

    @staticmethod
    def _undo_(codes: np.ndarray, dtype: torch.dtype, rows: np.ndarray, columns: np.ndarray) -> None:
        lowest, spare = _lowest(dtype, rows), _SPARE[dtype]
        if function := compiled_for("absolute", codes):
            function(codes, lowest, columns, *codes.shape, spare)
            return
        unsigned, sign_bit = codes.view(f"u{codes.itemsize}"), 8 * codes.itemsize - 1
        unsigned >>= spare
        changes = unsigned >> 1
        magnitudes = changes + lowest.view(unsigned.dtype) + columns.view(unsigned.dtype)
        magnitudes &= np.iinfo(codes.dtype).max
        magnitudes *= changes != 0
        np.bitwise_or(magnitudes, unsigned << sign_bit, out=unsigned)

    @staticmethod
    def _write(writer: BlockWriter, codes: np.ndarray, dtype: torch.dtype) -> None:
        planes = scratch("planes", [codes.itemsize, len(codes)], np.uint8)
        split_planes(codes, planes)
        for significance, plane in enumerate(planes):
            writer.write(_packed(plane) if significance == 0 and _SPARE[dtype] else plane)

    @staticmethod
    def _read(reader: BlockReader, first_block: int, codes: np.ndarray, dtype: torch.dtype) -> None:
        sizes = [_packed_bytes(len(codes)) if _SPARE[dtype] else len(codes)] + [len(codes)] * (codes.itemsize - 1)
        planes = [reader.read(first_block + significance, size) for significance, size in enumerate(sizes)]
        if _SPARE[dtype]:
            planes[0] = _unpacked(planes[0], len(codes))
        join_planes(planes, codes)


def _lowest(dtype: torch.dtype, rows: np.ndarray) -> np.ndarray:
    """Lower the predictions of rows by LOW octaves, so that a change of 1 is the smallest one."""
    return rows - rows.dtype.type(_LOW[dtype] << MANTISSA_BITS[dtype])


def _packed_bytes(count: int) -> int:
    """Return the bytes that `count` bytes of six bits take."""
    return count // _GROUP * (_GROUP // 4 * 3) + (count % _GROUP + 3) // 4 * 3


def _packed(plane: np.ndarray) -> np.ndarray:
    """Pack bytes whose lowest two bits are 0, uint8 [n], into scratch."""
    packed = scratch("packed", [_packed_bytes(len(plane))], np.uint8)
    if library := compiled():
        library.pack_six(plane, len(plane), packed)
        return packed
    start = 0
    for group, size in _groups(len(plane)):
        quarters = np.zeros([4, -(-size // 4)], np.uint8)
        quarters.reshape(-1)[:size] = plane[group : group + size]
        quarters[:3] |= quarters[3] >> np.array([[2], [4], [6]], np.uint8) & 3
        packed[start : start + quarters[:3].size] = quarters[:3].reshape(-1)
        start += quarters[:3].size
    return packed


def _unpacked(packed: np.ndarray, count: int) -> np.ndarray:
    """Undo `_packed` for a plane of `count` bytes, into scratch."""
    plane = scratch("unpacked", [count], np.uint8)
    if library := compiled():
        library.unpack_six(packed, count, plane)
        return plane
    start = 0
    for group, size in _groups(count):
        thirds = packed[start : start + -(-size // 4) * 3].reshape(3, -1)
        last = (thirds & 3) << np.array([[2], [4], [6]], np.uint8)
        quarters = np.concatenate([thirds & 0xFC, last[:1] | last[1:2] | last[2:]])
        plane[group : group + size] = quarters.reshape(-1)[:size]
        start += thirds.size
    return plane


def _groups(count: int) -> list[tuple[int, int]]:
    """Return the first byte and the size of each group of a plane."""
    return [(start, min(_GROUP, count - start)) for start in range(0, count, _GROUP)]
