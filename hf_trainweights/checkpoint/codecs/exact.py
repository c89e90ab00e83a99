"""The lossless codecs: `raw` stores bytes as they are, the others code bytes of equal significance ("planes") together.

The one payload of `raw` has the elements in row-major order, little-endian, and nothing else.

`planes` cuts the tensor into chunks of 2**18 components (a complex number has two components). In each chunk it rotates
every floating point component of more than one byte left by one bit, so that the exponent fills the top byte and the
sign goes to the lowest bit. Then the bytes of each significance make one block, lowest first (`coding/blocks.py`).
Mantissas are noise and stay as they are; exponents are entropy-coded.

`planes-delta` stores a chunk as its difference to the anchor if that is smaller. The difference is the wrapping integer
difference of the bit patterns, tensor minus anchor, zigzag coded: 0, -1, 1, -2, ... become 0, 1, 2, 3, ..., so that
small differences leave the high bytes zero. One-byte components are not zigzag coded. The difference is exact, which a
difference of floats is not. It takes half a bit to one bit less per component than an exclusive or, which changes many
high bits where a small step crosses a power of two.

`planes-rank1` is for Adam's exp_avg_sq. It predicts each element from its row and column, and stores a chunk as
differences to these predictions if that is smaller. The bit pattern of a positive float is nearly linear in its
logarithm. So r + c, the element's row's and column's mean of log2 (see `rank1`), predicts the bit pattern, and the
difference needs few bits of the exponent. All numbers are integers that wrap around:

    prediction = (r + c) * 2**m / 128 + (bias << m)         r, c in units of 1/128; m mantissa bits of the dtype
    code = 0 if the bits are 0, else 1 + zigzag(bits - prediction)

The chunks of `planes-rank1` are tiles of at most 2**18 elements (`tiles` of
`coding/blocks.py`), each contiguous in memory, so that a `reshape` of it is a view.

All codecs but `raw` have these payloads; itemsize is the bytes of a component:

| payload | content |
|---|---|
| 0 | chunks x itemsize blocks, chunk by chunk; then, except in `planes`, one block of one byte per chunk |
| 1 | in `planes-rank1` alone: as in `rank1` |

The byte of a chunk, its flag, is 1 if the chunk holds differences, which are not rotated, and 0 if it is stored as by
`planes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import (
    LOSSY_DTYPES,
    ROLES,
    SQUARES,
    Codec,
    EncodedTensor,
    Params,
    References,
)
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
from hf_trainweights.checkpoint.codecs.coding.planes import is_smaller, read_planes, sample_step, write_planes
from hf_trainweights.checkpoint.codecs.coding.rank1 import decode_means, encode_means, log_means, predictions
from hf_trainweights.files.byte_planes import compiled_for, word_layout, words_of


@dataclass(frozen=True)
class Raw(Codec):
    """Stores bytes unchanged: for small tensors, and for tensors that no other codec makes smaller."""

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
    """Codes byte planes; bit-exact for NaN payloads, infinities, -0.0 and denormals.

    If a subclass lists `anchor` among its `references`, a chunk may be stored as its difference to the anchor.
    """

    codec_id: ClassVar[str] = "planes"
    lossless: ClassVar[bool] = True
    roles: ClassVar[tuple[str, ...]] = ROLES

    def _chunks(self, tensor: Tensor, references: References) -> Chunks:
        words, dtype = words_of(tensor), tensor.dtype
        anchor = words_of(references["anchor"]) if "anchor" in references else None

        def write(writer: BlockWriter, chunk: slice) -> bool:
            x = words[chunk]
            step = sample_step(len(x))
            if anchor is not None and is_smaller(_zigzag_(x[::step] - anchor[chunk][::step]), x[::step], dtype):
                write_planes(writer, _zigzag_(x - anchor[chunk]))
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
        chunks = -(-count // CHUNK)
        reader = BlockReader(cls, payloads[0], chunks * itemsize + has_flags)
        is_delta = reader.read(chunks * itemsize, chunks) if has_flags else np.zeros(chunks, bool)
        anchor = words_of(cls.needed(references, "anchor")) if is_delta.any() else None
        # `memory` may be the anchor's own: a chunk of the anchor is overwritten only after it was added.
        memory = cls.spare_memory(references)
        decoded = empty(shape, dtype) if memory is None else memory
        decoded_words = words_of(decoded)
        for index, chunk in enumerate(chunk_ranges(count)):
            out = decoded_words[chunk]
            if anchor is None or not is_delta[index]:
                read_planes(reader, index * itemsize, out, dtype)
                continue
            codes = scratch("codes", out.shape, out.dtype)
            read_planes(reader, index * itemsize, codes)
            _add_(codes, anchor[chunk])
            out[:] = codes
        return decoded


@dataclass(frozen=True)
class PlanesDelta(Planes):
    """Codes byte planes of each chunk or of its difference to the anchor, whichever is smaller for a sample of it.

    If there is no anchor, every chunk is coded as by `planes`.
    """

    codec_id: ClassVar[str] = "planes-delta"
    roles: ClassVar[tuple[str, ...]] = ("weight",)
    references: ClassVar[tuple[str, ...]] = ("anchor",)


@dataclass(frozen=True)
class PlanesRank1(ChunkedCodec):
    """Codes byte planes of the difference to a rank-1 prediction; bit-exact for any number."""

    codec_id: ClassVar[str] = "planes-rank1"
    lossless: ClassVar[bool] = True
    roles: ClassVar[tuple[str, ...]] = SQUARES
    dtypes: ClassVar[frozenset[torch.dtype]] = LOSSY_DTYPES
    # The means are multiples of it, in units of 1/128. A reader takes any.
    _multiple: ClassVar[int] = 1

    def _chunks(self, tensor: Tensor, references: References) -> Chunks:
        shape, dtype = matrix_shape(tensor.shape), tensor.dtype
        means = log_means(tensor.view(shape), self._multiple)
        words = words_of(tensor).reshape(shape)
        predicted = predictions(*means, dtype)

        def write(writer: BlockWriter, tile: Tile) -> int:
            rows, columns = tile
            elements = words[rows, columns]
            codes, flag = self._codes(elements, dtype, predicted[0][rows], predicted[1][columns])
            x = elements.reshape(-1)
            step = sample_step(len(x))
            if flag and is_smaller(codes.reshape(-1)[::step], x[::step], dtype):
                self._write(writer, codes.reshape(-1), dtype, flag)
                return flag
            write_planes(writer, x, dtype)
            return 0

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
        flags = reader.read(count * dtype.itemsize, count)
        # Allocated before torch allocates anything: for a shape that is too large numpy raises the MemoryError that
        # `decode` expects, and torch a RuntimeError.
        decoded = empty(matrix, dtype)
        words = words_of(decoded).reshape(matrix)
        predicted = predictions(*decode_means(cls, payloads[1], *matrix), dtype)
        for index, (rows, columns) in enumerate(tiles(*matrix, CHUNK)):
            out, first_block = words[rows, columns], index * dtype.itemsize
            if flag := int(flags[index]):
                cls._read(reader, first_block, out.reshape(-1), dtype, flag)
                cls._undo_(out, dtype, flag, predicted[0][rows], predicted[1][columns])
            else:
                read_planes(reader, first_block, out.reshape(-1), dtype)
        return decoded.view(shape)

    @staticmethod
    def _codes(words: np.ndarray, dtype: torch.dtype, rows: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, int]:
        """Return codes of a contiguous matrix [R, C], maybe in scratch, and their flag, 0 if a word has no code.

        `rows` and `columns` are those of the matrix in `predictions`.
        """
        codes = _predicted_codes(words, rows, columns)
        # The code of a number 2**31 below its prediction would wrap around to 0, which stands for bits of 0.
        return codes, int(np.count_nonzero(codes) == np.count_nonzero(words))

    @classmethod
    def _undo_(cls, codes: np.ndarray, dtype: torch.dtype, flag: int, rows: np.ndarray, columns: np.ndarray) -> None:
        """Turn codes into words, in place; the arguments are those and the result of `_codes`."""
        _undo_predicted_codes_(codes, rows, columns)

    @staticmethod
    def _write(writer: BlockWriter, codes: np.ndarray, dtype: torch.dtype, flag: int) -> None:
        """Write the codes, 1-D, one block for each byte of significance."""
        write_planes(writer, codes)

    @classmethod
    def _read(cls, reader: BlockReader, first_block: int, codes: np.ndarray, dtype: torch.dtype, flag: int) -> None:
        """Undo `_write`: fill `codes`; CorruptFileError: a block or the flag is damaged."""
        read_planes(reader, first_block, codes)


def _add_(codes: np.ndarray, anchor: np.ndarray) -> None:
    """Turn zigzag coded differences to the words of an anchor into the words of the tensor, in place."""
    if function := compiled_for("add", codes):
        function(codes, anchor, len(codes))
    else:
        np.add(_unzigzag_(codes), anchor, out=codes)


def _zigzag_(delta: np.ndarray) -> np.ndarray:
    """Turn 0, -1, 1, -2, ... into 0, 1, 2, 3, ... in place, and return the argument; single bytes stay as they are."""
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


def _predicted_codes(words: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return the codes of a contiguous matrix [R, C], maybe in scratch; `rows` and `columns` as in `predictions`."""
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
    """Turn the codes of a contiguous matrix into words, in place; `rows` and `columns` as in `predictions`."""
    if function := compiled_for("add_sums", codes):
        function(codes, rows, columns, *codes.shape)
        return
    nonzero = codes != 0
    codes -= 1
    _unzigzag_(codes)
    codes += rows
    codes += columns
    codes *= nonzero
