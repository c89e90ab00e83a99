"""`planes`: lossless for every dtype; the bytes of equal significance are coded together.

The tensor is cut into chunks of 2**18 components (a complex number is two). In each, every floating point
component is rotated left by one bit, so that the exponent fills the top byte and the sign goes to the lowest
bit; then the bytes of each significance make one block, lowest first (see `entropy`). Mantissas are noise and
stay as they are; exponents are coded.

| payload | content |
|---|---|
| 0 | chunks x itemsize blocks |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import ROLES, Codec, Encoded, Json, References, empty
from hf_trainweights.checkpoint.codecs.entropy import BlockReader, BlockWriter, chunk_count, chunk_ranges

_SAMPLE = 4096

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Planes(Codec):
    """Codes byte planes; bit-exact for NaN payloads, infinities, -0.0 and denormals.

    Example:
        >>> import torch
        >>> weight = torch.randn(256, 256)
        >>> encoded = Planes().encode(weight)
        >>> encoded.payload_bytes < weight.nbytes
        True
        >>> torch.equal(Planes.decode(encoded.payloads, encoded.params, [256, 256], torch.float32), weight)
        True
    """

    codec_id: ClassVar[str] = "planes"
    lossless: ClassVar[bool] = True
    roles: ClassVar[tuple[str, ...]] = ROLES

    def _encode(self, tensor: Tensor, references: References) -> Encoded:
        words = words_of(tensor)
        writer = BlockWriter()
        for chunk in chunk_ranges(len(words)):
            write_planes(writer, fold(words[chunk], tensor.dtype))
        return Encoded([writer.payload()], {})

    @classmethod
    def _decode(
        cls,
        payloads: Sequence[Tensor],
        params: Mapping[str, Json],
        shape: torch.Size,
        dtype: torch.dtype,
        references: References,
    ) -> Tensor:
        cls.check_count(payloads, 1)
        itemsize, count = word_layout(shape, dtype)
        chunks = chunk_count(count)
        reader = BlockReader(cls, payloads[0], chunks * itemsize)
        words = empty([count], WORDS[itemsize])
        for index, chunk in enumerate(chunk_ranges(count)):
            read_planes(reader, index * itemsize, words[chunk])
            unfold_(words[chunk], dtype)
        return words.view(dtype).view(shape)


def word_layout(shape: torch.Size, dtype: torch.dtype) -> tuple[int, int]:
    """Returns bytes per component and the number of components of a tensor."""
    itemsize = dtype.to_real().itemsize if dtype.is_complex else dtype.itemsize
    return itemsize, shape.numel() * dtype.itemsize // itemsize


def words_of(tensor: Tensor) -> Tensor:
    """Returns the components of a contiguous tensor as integers, 1-D, a view."""
    return tensor.reshape(-1).view(WORDS[word_layout(tensor.shape, tensor.dtype)[0]])


def fold(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotates floats left by one bit; returns a copy of integers."""
    if not _is_rotated(words, dtype):
        return words.clone()
    # The arithmetic shift gives 0 or -1, and the left shift an even number: subtracting sets the lowest bit.
    return (words << 1).sub_(words >> (8 * words.itemsize - 1))


def unfold_(words: Tensor, dtype: torch.dtype) -> None:
    """Undoes `fold`, in place."""
    if _is_rotated(words, dtype):
        unsigned = words.numpy().view(f"u{words.itemsize}")
        sign = unsigned << (8 * words.itemsize - 1)
        np.right_shift(unsigned, 1, out=unsigned)
        np.bitwise_or(unsigned, sign, out=unsigned)


def zigzag(delta: Tensor) -> Tensor:
    """Makes small differences small numbers: 0, -1, 1, -2, ... become 0, 1, 2, 3, ...; bytes stay as they are."""
    if delta.itemsize == 1:
        return delta
    return (delta << 1).bitwise_xor_(delta >> (8 * delta.itemsize - 1))


def unzigzag_(words: Tensor) -> Tensor:
    """Undoes `zigzag` in place; returns its argument."""
    if words.itemsize == 1:
        return words
    negative = (words & 1).neg_()
    mask = (1 << (8 * words.itemsize - 1)) - 1
    return words.bitwise_right_shift_(1).bitwise_and_(mask).bitwise_xor_(negative)


def sample_of(words: Tensor) -> Tensor:
    """Returns a view of at most 4096 words, evenly spread: enough to tell which of two codings is smaller."""
    return words[:: len(words) // _SAMPLE + 1]


def plane_bits(words: Tensor) -> float:
    """Returns the order-0 entropy of the byte planes, in bits per word."""
    planes = words.contiguous().view(torch.uint8).view(-1, words.itemsize).numpy()
    bits = 0.0
    for plane in planes.T:
        share = np.bincount(plane, minlength=256) / len(planes)
        present = share[share > 0]
        bits -= float(np.dot(present, np.log2(present)))
    return bits


def write_planes(writer: BlockWriter, words: Tensor) -> None:
    """Writes one block per byte of significance, lowest first; `words` are overwritten."""
    for plane in range(words.itemsize):
        if plane:
            words.bitwise_right_shift_(8)
        # Narrowing keeps the lowest byte; this is faster than a strided copy of bytes.
        writer.write(words.to(torch.uint8).numpy())


def read_planes(reader: BlockReader, first_block: int, out: Tensor) -> None:
    """Fills `out` with the words whose planes start at block `first_block`.

    Raises:
        CorruptFileError: A block is damaged.
    """
    planes = [reader.read(first_block + index, len(out)) for index in range(out.itemsize)]
    # Neighbours are joined to words of twice their size: half the work of shifting one byte after the other in.
    for size in (2, 4, 8)[: out.itemsize.bit_length() - 1]:
        pairs = zip(planes[::2], planes[1::2], strict=True)
        planes = [_join(low, high, f"u{size}") for low, high in pairs]
    np.copyto(out.numpy().view(planes[0].dtype), planes[0])


def _join(low: np.ndarray, high: np.ndarray, dtype: str) -> np.ndarray:
    """Returns unsigned words of twice the size."""
    joined = np.multiply(high, 1 << (8 * low.itemsize), dtype=dtype)
    return np.bitwise_or(joined, low, out=joined)


def _is_rotated(words: Tensor, dtype: torch.dtype) -> bool:
    return words.itemsize > 1 and (dtype.is_floating_point or dtype.is_complex)
