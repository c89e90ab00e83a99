"""The lossless codecs: bytes as they are, and those of equal significance coded together.

The one payload of `raw` has the elements in row-major order, little-endian, and nothing else.

`planes` cuts the tensor into chunks of 2**18 components (a complex number is two). In each, every floating point
component of more than one byte is rotated left by one bit, so that the exponent fills the top byte and the sign goes
to the lowest bit; then the bytes of each significance make one block, lowest first (see `blocks`). Mantissas are noise
and stay as they are; exponents are coded.

`planes-delta` holds in a chunk the difference to the anchor where that is smaller: the wrapping integer difference of
the bit patterns, tensor minus anchor, zigzag coded (0, -1, 1, -2, ... become 0, 1, 2, 3, ...; one-byte components are
not), so that small differences leave the high bytes zero. It is exact, which a difference of floats is not, and half a
bit to one bit smaller than an exclusive or, whose carries reach high bits.

`planes-rank1`, for Adam's exp_avg_sq, holds the difference to a prediction from row and column where that is smaller.
The bit pattern of a positive float is nearly linear in its logarithm, so that a row's plus a column's mean of log2
(see `rank1`) predict it, which saves most of the exponent. In whole numbers, wrapping:

    prediction = (r + c) * 2**m / 128 + (bias << m)         r, c in units of 1/128; m mantissa bits of the dtype
    code = 0 if the bits are 0, else 1 + zigzag(bits - prediction)

Its chunks are tiles of at most 2**18 elements (see `levels`).

| payload of the others | content |
|---|---|
| 0 | chunks x itemsize blocks, chunk by chunk; then, but not for `planes`, one of a byte per chunk |
| 1 | of `planes-rank1` alone: as in `rank1` |

The byte is 1 for a difference, which is not rotated, and 0 for a chunk as `planes` has it; itemsize is a component's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import LOSSY_DTYPES, ROLES, Codec, EncodedTensor, Params, References
from hf_trainweights.checkpoint.codecs.coding.blocks import (
    CHUNK,
    BlockReader,
    BlockWriter,
    ChunkedCodec,
    Chunks,
    Tile,
    chunk_ranges,
    empty,
    matrix_shape,
    scratch,
    tile_count,
    tiles,
)
from hf_trainweights.checkpoint.codecs.coding.rank1 import MEAN_UNITS, decode_means, encode_means, log_means
from hf_trainweights.files.byte_planes import compiled_for, fold, join_planes, split_planes, word_layout, words_of

_SAMPLE = 4096
# Mantissa bits and bias of the exponent.
_LAYOUTS = {torch.float32: (23, 127), torch.bfloat16: (7, 127), torch.float16: (10, 15)}


@dataclass(frozen=True)
class Raw(Codec):
    """Stores bytes unchanged, for small tensors and for those that no codec makes smaller."""

    codec_id: ClassVar[str] = "raw"
    lossless: ClassVar[bool] = True
    roles: ClassVar[tuple[str, ...]] = ROLES

    def _encode(self, tensor: Tensor, references: References) -> EncodedTensor:
        return EncodedTensor([tensor.reshape(-1).view(torch.uint8).clone()], {})

    @classmethod
    def _decode(
        cls, payloads: Sequence[Tensor], params: Params, shape: torch.Size, dtype: torch.dtype, references: References
    ) -> Tensor:
        cls.check_count(payloads, 1)
        payload = payloads[0]
        expected_bytes = shape.numel() * dtype.itemsize
        if payload.numel() != expected_bytes:
            raise cls.corrupt("payload 0", f"{expected_bytes} bytes", f"{payload.numel()} bytes")
        decoded = empty(shape, dtype)
        decoded.view(-1).view(torch.uint8).copy_(payload)
        return decoded


@dataclass(frozen=True)
class Planes(ChunkedCodec):
    """Codes byte planes; bit-exact for NaN payloads, infinities, -0.0 and denormals."""

    codec_id: ClassVar[str] = "planes"
    lossless: ClassVar[bool] = True
    roles: ClassVar[tuple[str, ...]] = ROLES

    def _chunks(self, tensor: Tensor, references: References) -> Chunks:
        words, dtype = words_of(tensor), tensor.dtype
        near = words_of(references["anchor"]) if "anchor" in references else None

        def write(writer: BlockWriter, chunk: slice) -> bool:
            x = words[chunk]
            step = _sample_step(len(x))
            if near is not None and _is_smaller(_zigzag_(x[::step] - near[chunk][::step]), x[::step], dtype):
                _write_planes(writer, _zigzag_(x - near[chunk]))
                return True
            _write_planes(writer, x, dtype)
            return False

        return Chunks(tensor.nbytes, [*chunk_ranges(len(words))], write, has_flags="anchor" in self.references)

    @classmethod
    def _decode(
        cls, payloads: Sequence[Tensor], params: Params, shape: torch.Size, dtype: torch.dtype, references: References
    ) -> Tensor:
        cls.check_count(payloads, 1)
        (itemsize, count), has_flags = word_layout(shape, dtype), "anchor" in cls.references
        chunks = -(-count // CHUNK)
        reader = BlockReader(cls, payloads[0], chunks * itemsize + has_flags)
        is_delta = reader.read(chunks * itemsize, chunks) if has_flags else np.zeros(chunks, bool)
        near = words_of(cls.needed(references, "anchor")) if is_delta.any() else None
        memory = cls.spare_memory(references)
        decoded = empty(shape, dtype) if memory is None else memory
        decoded_words = words_of(decoded)
        for index, chunk in enumerate(chunk_ranges(count)):
            out = decoded_words[chunk]
            if near is None or not is_delta[index]:
                _read_planes(reader, index * itemsize, out, dtype)
                continue
            codes = scratch("codes", out.shape, out.dtype)
            _read_planes(reader, index * itemsize, codes)
            _add_(codes, near[chunk])
            out[:] = codes
        return decoded


@dataclass(frozen=True)
class PlanesDelta(Planes):
    """Codes byte planes of the tensor or of its difference to the anchor, whichever a sample says is smaller.

    Without an anchor it codes every chunk plain.
    """

    codec_id: ClassVar[str] = "planes-delta"
    roles: ClassVar[tuple[str, ...]] = ("weight",)
    references: ClassVar[tuple[str, ...]] = ("anchor",)


@dataclass(frozen=True)
class PlanesRank1(ChunkedCodec):
    """Codes byte planes of the difference to a rank-1 prediction; bit-exact for any number."""

    codec_id: ClassVar[str] = "planes-rank1"
    lossless: ClassVar[bool] = True
    roles: ClassVar[tuple[str, ...]] = ("exp_avg_sq",)
    dtypes: ClassVar[frozenset[torch.dtype]] = LOSSY_DTYPES

    def _chunks(self, tensor: Tensor, references: References) -> Chunks:
        shape, dtype = matrix_shape(tensor.shape), tensor.dtype
        means = log_means(tensor.view(shape))
        words = words_of(tensor).reshape(shape)
        predicted = _predictions(*means, dtype)

        def write(writer: BlockWriter, place: Tile) -> bool:
            rows, columns = place
            tile = words[rows, columns]
            codes = _predicted_codes(tile, predicted[0][rows], predicted[1][columns])
            x, codes = tile.reshape(-1), codes.reshape(-1)
            step = _sample_step(len(x))
            # The code of a number 2**31 below its prediction would wrap around to 0.
            if _is_smaller(codes[::step], x[::step], dtype) and np.count_nonzero(codes) == np.count_nonzero(x):
                _write_planes(writer, codes)
                return True
            _write_planes(writer, x, dtype)
            return False

        others = (encode_means(*means),)
        return Chunks(tensor.nbytes, [*tiles(*shape, CHUNK)], write, has_flags=True, others=others)

    @classmethod
    def _decode(
        cls, payloads: Sequence[Tensor], params: Params, shape: torch.Size, dtype: torch.dtype, references: References
    ) -> Tensor:
        cls.check_count(payloads, 2)
        matrix = matrix_shape(shape)
        count = tile_count(*matrix, CHUNK)
        reader = BlockReader(cls, payloads[0], count * dtype.itemsize + 1)
        is_difference = reader.read(count * dtype.itemsize, count)
        # First of all, because numpy says by a MemoryError that the shape is too large, and torch by a RuntimeError.
        decoded = empty(matrix, dtype)
        words = words_of(decoded).reshape(matrix)
        predicted = _predictions(*decode_means(cls, payloads[1], *matrix), dtype)
        for index, (rows, columns) in enumerate(tiles(*matrix, CHUNK)):
            out = words[rows, columns]
            _read_planes(reader, index * dtype.itemsize, out.reshape(-1), None if is_difference[index] else dtype)
            if is_difference[index]:
                _undo_predicted_codes_(out, predicted[0][rows], predicted[1][columns])
        return decoded.view(shape)


def _add_(codes: np.ndarray, near: np.ndarray) -> None:
    """Undo in place what `_zigzag_` made of the differences of words to others."""
    if function := compiled_for("add", codes):
        function(codes, near, len(codes))
    else:
        np.add(_unzigzag_(codes), near, out=codes)


def _zigzag_(delta: np.ndarray) -> np.ndarray:
    """Make small differences small numbers, in place, but for single bytes, and return the argument.

    0, -1, 1, -2, ... become 0, 1, 2, 3, ...
    """
    if delta.itemsize > 1:
        sign = delta >> (8 * delta.itemsize - 1)
        np.left_shift(delta, 1, out=delta)
        np.bitwise_xor(delta, sign, out=delta)
    return delta


def _unzigzag_(words: np.ndarray) -> np.ndarray:
    """Undo `_zigzag_` in place and return the argument."""
    if words.itemsize > 1:
        unsigned = words.view(f"u{words.itemsize}")
        sign = unsigned & 1
        np.negative(sign, out=sign)
        np.right_shift(unsigned, 1, out=unsigned)
        np.bitwise_xor(unsigned, sign, out=unsigned)
    return words


def _sample_step(count: int) -> int:
    """Return the distance of words in a sample of at most 4096: enough to tell which of two codings is smaller."""
    return count // _SAMPLE + 1


def _is_smaller(codes: np.ndarray, words: np.ndarray, dtype: torch.dtype) -> bool:
    """Return whether codes of the words of a tensor take fewer bits than these."""
    return _plane_bits(codes) < _plane_bits(fold(words, dtype))


def _plane_bits(words: np.ndarray) -> float:
    """Return the order-0 entropy of the byte planes, in bits per word."""
    planes = np.ascontiguousarray(words).view(np.uint8).reshape(-1, words.itemsize)
    # One count for all planes: 256 numbers for each.
    numbers = planes + np.arange(words.itemsize, dtype=np.uint16) * np.uint16(256)
    counts = np.bincount(numbers.reshape(-1))
    share = counts[counts > 0] / len(words)
    return -float(np.dot(share, np.log2(share)))


def _write_planes(writer: BlockWriter, words: np.ndarray, folded: torch.dtype | None = None) -> None:
    """Write one block per byte of significance, lowest first, of codes or, given the tensor's dtype, its words."""
    planes = scratch("planes", [words.itemsize, len(words)], np.uint8)
    split_planes(words, planes, folded)
    for plane in planes:
        writer.write(plane)


def _read_planes(reader: BlockReader, first_block: int, out: np.ndarray, folded: torch.dtype | None = None) -> None:
    """Fill `out` with codes or, given the tensor's dtype, words whose planes start at block `first_block`.

    CorruptFileError: a block is damaged.
    """
    join_planes([reader.read(first_block + index, len(out)) for index in range(out.itemsize)], out, folded)


def _predictions(row_means: Tensor, column_means: Tensor, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return the parts of rows, [R, 1], and of columns, [C], in a predicted bit pattern; words of the dtype's size."""
    mantissa_bits, bias = _LAYOUTS[dtype]
    unit = (1 << mantissa_bits) // MEAN_UNITS
    rows, columns = (row_means * unit + (bias << mantissa_bits))[:, None], column_means * unit
    return rows.numpy().astype(f"i{dtype.itemsize}"), columns.numpy().astype(f"i{dtype.itemsize}")


def _predicted_codes(words: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return the codes of a contiguous matrix [R, C], given the predictions' parts, [R, 1] and [C]; maybe scratch."""
    if function := compiled_for("subtract_sums", words):
        codes = scratch("codes", words.shape, words.dtype)
        function(words, rows, columns, *words.shape, codes)
        return codes
    codes = words - rows
    codes -= columns
    _zigzag_(codes)
    codes += 1
    codes *= words != 0
    return codes


def _undo_predicted_codes_(codes: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> None:
    """Turn the codes of a contiguous matrix into words, in place."""
    if function := compiled_for("add_sums", codes):
        function(codes, rows, columns, *codes.shape)
        return
    nonzero = codes != 0
    codes -= 1
    _unzigzag_(codes)
    codes += rows
    codes += columns
    codes *= nonzero
