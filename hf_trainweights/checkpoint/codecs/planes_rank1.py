"""`planes-rank1`: Adam's exp_avg_sq, lossless; as `planes`, but of the difference to what row and column predict.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import LOSSY_DTYPES, Codec, Encoded, Json, References, empty
from hf_trainweights.checkpoint.codecs.entropy import CHUNK, BlockReader, BlockWriter
from hf_trainweights.checkpoint.codecs.levels import Tile, matrix_shape, tile_count, tiles
from hf_trainweights.checkpoint.codecs.planes import (
    WORDS,
    fold,
    plane_bits,
    read_planes,
    sample_of,
    unfold_,
    unzigzag_,
    words_of,
    write_planes,
    zigzag,
)
from hf_trainweights.checkpoint.codecs.rank1 import MEAN_UNITS, decode_means, encode_means, log_means

# Mantissa bits and bias of the exponent.
_LAYOUTS = {torch.float32: (23, 127), torch.bfloat16: (7, 127), torch.float16: (10, 15)}


@dataclass(frozen=True)
class PlanesRank1(Codec):
    """Codes byte planes of the difference to a rank-1 prediction; bit-exact for any number.

    Example:
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

    def _encode(self, tensor: Tensor, references: References) -> Encoded:
        shape = matrix_shape(tensor.shape)
        means = log_means(tensor.view(shape))
        words = words_of(tensor).view(shape)
        predicted = _predictions(*means, tensor.dtype)
        writer = BlockWriter()
        is_difference: list[bool] = []
        for tile in tiles(*shape, CHUNK):
            codes = _codes(words[tile], tile, predicted)
            plain = words[tile].reshape(-1)
            # The one number below the prediction whose code wraps around to 0 is left to plain tiles.
            is_exact = np.count_nonzero(codes.numpy()) == np.count_nonzero(plain.numpy())
            smaller = plane_bits(sample_of(codes)) < plane_bits(fold(sample_of(plain), tensor.dtype))
            is_difference.append(is_exact and smaller)
            write_planes(writer, codes if is_difference[-1] else fold(plain, tensor.dtype))
        writer.write(np.array(is_difference, np.uint8))
        return Encoded([writer.payload(), encode_means(*means)], {})

    @classmethod
    def _decode(
        cls,
        payloads: Sequence[Tensor],
        params: Mapping[str, Json],
        shape: torch.Size,
        dtype: torch.dtype,
        references: References,
    ) -> Tensor:
        cls.check_count(payloads, 2)
        matrix = matrix_shape(shape)
        count = tile_count(*matrix, CHUNK)
        reader = BlockReader(cls, payloads[0], count * dtype.itemsize + 1)
        is_difference = reader.read(count * dtype.itemsize, count)
        predicted = _predictions(*decode_means(cls, payloads[1], *matrix), dtype)
        words = empty(matrix, WORDS[dtype.itemsize])
        for index, tile in enumerate(tiles(*matrix, CHUNK)):
            out = words[tile]
            read_planes(reader, index * dtype.itemsize, out.view(-1))
            if is_difference[index]:
                _undo_codes_(out, tile, predicted)
            else:
                unfold_(out, dtype)
        return words.view(dtype).view(shape)


def _predictions(row_means: Tensor, column_means: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns what rows, [R, 1], and columns, [C], add to the predicted bit pattern; words of the dtype's size."""
    mantissa_bits, bias = _LAYOUTS[dtype]
    unit = (1 << mantissa_bits) // MEAN_UNITS
    rows = (row_means * unit + (bias << mantissa_bits))[:, None]
    return rows.to(WORDS[dtype.itemsize]), (column_means * unit).to(WORDS[dtype.itemsize])


def _codes(words: Tensor, tile: Tile, predicted: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the codes of a tile, 1-D."""
    codes = zigzag((words - predicted[0][tile[0]]).sub_(predicted[1][tile[1]])).add_(1)
    nonzero = words.numpy() != 0
    if not nonzero.all():
        codes.mul_(torch.from_numpy(nonzero))
    return codes.view(-1)


def _undo_codes_(codes: Tensor, tile: Tile, predicted: tuple[Tensor, Tensor]) -> None:
    """Turns the codes of a tile into words, in place."""
    nonzero = codes.numpy() != 0
    unzigzag_(codes.sub_(1)).add_(predicted[0][tile[0]]).add_(predicted[1][tile[1]])
    if not nonzero.all():
        codes.mul_(torch.from_numpy(nonzero))
