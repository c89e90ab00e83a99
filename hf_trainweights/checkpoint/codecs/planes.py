"""`planes` and `planes-delta`: lossless for every dtype; the bytes of equal significance are coded together.

The tensor is cut into chunks of 2**18 components (a complex number is two). In each, every floating point
component is rotated left by one bit, so that the exponent fills the top byte and the sign goes to the lowest
bit; then the bytes of each significance make one block, lowest first (see `blocks`). Mantissas are noise and
stay as they are; exponents are coded.

`planes-delta` holds in a chunk the difference to the anchor where that is smaller: the wrapping integer difference of
the bit patterns, tensor minus anchor, zigzag coded (0, -1, 1, -2, ... become 0, 1, 2, 3, ...; one-byte components are
not), so that small differences leave the high bytes zero. It is exact, which a difference of floats is not, and half a
bit to one bit smaller than an exclusive or, whose carries reach high bits.

| payload | content |
|---|---|
| 0 | chunks x itemsize blocks; of `planes-delta` then one block of a byte per chunk: 1 = difference, 0 = plain |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import ROLES, OwnAnchor, Params, References
from hf_trainweights.checkpoint.codecs.coding.blocks import (
    BlockReader,
    BlockWriter,
    ChunkedCodec,
    Chunks,
    chunk_count,
    chunk_ranges,
    empty,
    scratch,
)
from hf_trainweights.files.byte_planes import (
    compiled_for,
    fold,
    join_planes,
    split_planes,
    word_layout,
    words_of,
)

_SAMPLE = 4096


@dataclass(frozen=True)
class Planes(ChunkedCodec):
    """Codes byte planes; bit-exact for NaN payloads, infinities, -0.0 and denormals.

    Examples:
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

    def _chunks(self, tensor: Tensor, references: References) -> Chunks:
        words, dtype = words_of(tensor), tensor.dtype
        near = words_of(references["anchor"]) if "anchor" in references else None

        def write(writer: BlockWriter, chunk: slice) -> bool:
            x = words[chunk]
            if near is not None and _delta_is_smaller(x, near[chunk], dtype):
                write_planes(writer, zigzag_(x - near[chunk]))
                return True
            write_planes(writer, x, dtype)
            return False

        return Chunks(tensor.nbytes, [*chunk_ranges(len(words))], write, has_flags="anchor" in self.references)

    @classmethod
    def _decode(
        cls, payloads: Sequence[Tensor], params: Params, shape: torch.Size, dtype: torch.dtype, references: References
    ) -> Tensor:
        cls.check_count(payloads, 1)
        (itemsize, count), has_flags = word_layout(shape, dtype), "anchor" in cls.references
        chunks = chunk_count(count)
        reader = BlockReader(cls, payloads[0], chunks * itemsize + has_flags)
        is_delta = reader.read(chunks * itemsize, chunks) if has_flags else np.zeros(chunks, bool)
        anchor = cls.needed(references, "anchor") if is_delta.any() else None
        near = None if anchor is None else words_of(anchor)
        decoded = anchor if anchor is not None and isinstance(references, OwnAnchor) else empty(shape, dtype)
        decoded_words = words_of(decoded)
        for index, chunk in enumerate(chunk_ranges(count)):
            out = decoded_words[chunk]
            if near is None or not is_delta[index]:
                read_planes(reader, index * itemsize, out, dtype)
                continue
            codes = scratch("codes", out.shape, out.dtype)
            read_planes(reader, index * itemsize, codes)
            _add_(codes, near[chunk])
            out[:] = codes
        return decoded


@dataclass(frozen=True)
class PlanesDelta(Planes):
    """Codes byte planes of the tensor or of its difference to the anchor, whichever a sample says is smaller.

    Without an anchor it codes every chunk plain.

    Examples:
        >>> import torch
        >>> anchor = torch.randn(256, 256)
        >>> weight = anchor + 1e-6
        >>> encoded = PlanesDelta().encode(weight, {"anchor": anchor})
        >>> encoded.payload_bytes < weight.nbytes / 3
        True
    """

    codec_id: ClassVar[str] = "planes-delta"
    roles: ClassVar[tuple[str, ...]] = ("weight",)
    references: ClassVar[tuple[str, ...]] = ("anchor",)


def _delta_is_smaller(words: np.ndarray, anchor: np.ndarray, dtype: torch.dtype) -> bool:
    step = sample_step(len(words))
    sample = words[::step]
    return plane_bits(zigzag_(sample - anchor[::step])) < plane_bits(fold(sample, dtype))


def _add_(codes: np.ndarray, near: np.ndarray) -> None:
    """Undo in place what `zigzag_` made of the differences of words to others."""
    function = compiled_for("add", codes)
    if function is None:
        np.add(unzigzag_(codes), near, out=codes)
    else:
        function(codes, near, len(codes))


def zigzag_(delta: np.ndarray) -> np.ndarray:
    """Make small differences small numbers, in place, but for single bytes, and return the argument.

    0, -1, 1, -2, ... become 0, 1, 2, 3, ...
    """
    if delta.itemsize > 1:
        sign = delta >> (8 * delta.itemsize - 1)
        np.left_shift(delta, 1, out=delta)
        np.bitwise_xor(delta, sign, out=delta)
    return delta


def unzigzag_(words: np.ndarray) -> np.ndarray:
    """Undo `zigzag_` in place and return the argument."""
    if words.itemsize > 1:
        unsigned = words.view(f"u{words.itemsize}")
        sign = unsigned & 1
        np.negative(sign, out=sign)
        np.right_shift(unsigned, 1, out=unsigned)
        np.bitwise_xor(unsigned, sign, out=unsigned)
    return words


def sample_step(count: int) -> int:
    """Return the distance of words in a sample of at most 4096: enough to tell which of two codings is smaller."""
    return count // _SAMPLE + 1


def plane_bits(words: np.ndarray) -> float:
    """Return the order-0 entropy of the byte planes, in bits per word."""
    planes = np.ascontiguousarray(words).view(np.uint8).reshape(-1, words.itemsize)
    # One count for all planes: 256 numbers for each.
    numbers = planes + np.arange(words.itemsize, dtype=np.uint16) * np.uint16(256)
    counts = np.bincount(numbers.reshape(-1))
    share = counts[counts > 0] / len(words)
    return -float(np.dot(share, np.log2(share)))


def write_planes(writer: BlockWriter, words: np.ndarray, folded: torch.dtype | None = None) -> None:
    """Write one block per byte of significance, lowest first, of words, 1-D.

    With `folded`, the tensor's dtype, the words are those of the tensor itself, and `fold` decides how they are split.
    """
    planes = scratch("planes", [words.itemsize, len(words)], np.uint8)
    split_planes(words, planes, folded)
    for plane in planes:
        writer.write(plane)


def read_planes(reader: BlockReader, first_block: int, out: np.ndarray, folded: torch.dtype | None = None) -> None:
    """Fill `out` with the words whose planes start at block `first_block`, given what `write_planes` got.

    CorruptFileError: a block is damaged.
    """
    join_planes([reader.read(first_block + index, len(out)) for index in range(out.itemsize)], out, folded)
