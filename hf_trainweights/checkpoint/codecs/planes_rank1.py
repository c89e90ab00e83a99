"""`planes-rank1`: Adam's exp_avg_sq, lossless; as `planes`, but of the difference to a prediction from row and column.

The bit pattern of a positive float is nearly linear in its logarithm, so that a row's plus a column's mean of log2
(see `rank1`) predict it, which saves most of the exponent. In whole numbers, wrapping:

    prediction = (r + c) * 2**m / 128 + (bias << m)         r, c in units of 1/128; m mantissa bits of the dtype
    code = 0 if the bits are 0, else 1 + zigzag(bits - prediction)

The tensor is cut into tiles of at most 2**18 elements (see `levels`), each a difference or plain as in `planes`.

| payload | content |
|---|---|
| 0 | tiles x itemsize blocks as in `planes`, then one block of a byte per tile: 1 = difference, 0 = plain |
| 1 | as in `rank1` |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import LOSSY_DTYPES, Params, References
from hf_trainweights.checkpoint.codecs.coding.blocks import (
    CHUNK,
    BlockReader,
    BlockWriter,
    ChunkedCodec,
    Chunks,
    Tile,
    empty,
    matrix_shape,
    scratch,
    tile_count,
    tiles,
)
from hf_trainweights.checkpoint.codecs.coding.rank1 import MEAN_UNITS, decode_means, encode_means, log_means
from hf_trainweights.checkpoint.codecs.planes import (
    plane_bits,
    read_planes,
    sample_step,
    unzigzag_,
    write_planes,
    zigzag_,
)
from hf_trainweights.files.byte_planes import WORDS, compiled_for, fold, words_of

# Mantissa bits and bias of the exponent.
_LAYOUTS = {torch.float32: (23, 127), torch.bfloat16: (7, 127), torch.float16: (10, 15)}


@dataclass(frozen=True)
class PlanesRank1(ChunkedCodec):
    """Codes byte planes of the difference to a rank-1 prediction; bit-exact for any number.

    Examples:
        >>> import torch
        >>> rows, columns = torch.randn(300, 1) * 3, torch.randn(300) * 3
        >>> exp_avg_sq = (rows + columns + torch.randn(300, 300) - 30).exp2()
        >>> from hf_trainweights.checkpoint.codecs.planes import Planes
        >>> PlanesRank1().encode(exp_avg_sq).payload_bytes < 0.96 * Planes().encode(exp_avg_sq).payload_bytes
        True
    """

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
            tile = words[rows, columns], predicted[0][rows], predicted[1][columns]
            if _difference_is_smaller(*tile, dtype):
                codes = _code(*tile)
                # The code of a number 2**31 below its prediction would wrap around to 0.
                if np.count_nonzero(codes) == np.count_nonzero(tile[0]):
                    write_planes(writer, codes.reshape(-1))
                    return True
            write_planes(writer, tile[0].reshape(-1), dtype)
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
        decoded = empty(matrix, WORDS[dtype.itemsize])
        predicted = _predictions(*decode_means(cls, payloads[1], *matrix), dtype)
        for index, (rows, columns) in enumerate(tiles(*matrix, CHUNK)):
            out = decoded.numpy()[rows, columns]
            read_planes(reader, index * dtype.itemsize, out.reshape(-1), None if is_difference[index] else dtype)
            if is_difference[index]:
                _undo_codes_(out, predicted[0][rows], predicted[1][columns])
        return decoded.view(dtype).view(shape)


def _predictions(row_means: Tensor, column_means: Tensor, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return the parts of rows, [R, 1], and of columns, [C], in a predicted bit pattern; words of the dtype's size."""
    mantissa_bits, bias = _LAYOUTS[dtype]
    unit = (1 << mantissa_bits) // MEAN_UNITS
    rows = (row_means * unit + (bias << mantissa_bits))[:, None]
    return rows.to(WORDS[dtype.itemsize]).numpy(), (column_means * unit).to(WORDS[dtype.itemsize]).numpy()


def _difference_is_smaller(words: np.ndarray, rows: np.ndarray, columns: np.ndarray, dtype: torch.dtype) -> bool:
    positions = np.arange(0, words.size, sample_step(words.size))
    row, column = np.divmod(positions, words.shape[1])
    sample = words.reshape(-1)[positions]
    return plane_bits(_code(sample, rows[row, 0], columns[column])) < plane_bits(fold(sample, dtype))


def _code(words: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return the codes of a contiguous matrix [R, C], given [R, 1] and [C]; or of words and a number each for both."""
    function = compiled_for("subtract_sums", words)
    if function is not None and words.ndim == 2:
        codes = scratch("codes", words.shape, words.dtype)
        function(words, rows, columns, *words.shape, codes)
        return codes
    codes = words - rows
    codes -= columns
    zigzag_(codes)
    codes += 1
    codes *= words != 0
    return codes


def _undo_codes_(codes: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> None:
    """Turn the codes of a contiguous matrix into words, in place."""
    function = compiled_for("add_sums", codes)
    if function is not None:
        function(codes, rows, columns, *codes.shape)
        return
    nonzero = codes != 0
    codes -= 1
    unzigzag_(codes)
    codes += rows
    codes += columns
    codes *= nonzero
