"""Predicts magnitudes from their rows and columns, by means of logarithms; `moments`, `exact`, `magnitudes` use this.

The tensor is viewed as a matrix [R, C] (see `levels`). The mean of a row is that of log2 of its magnitudes. The mean of
a column is that of the residuals: log2 of its magnitudes minus the means of their rows. Both are taken over a sample of
the elements that are not zero, in units of log2 (1 is a factor of two), and rounded to multiples of 1/128. The sum of
both means predicts log2 of a magnitude. So R + C numbers predict R * C elements, and the predictions are a matrix of
rank 1.

The payload is one block (see `blocks`) of int16 numbers in units of 1/128: the R means of rows if C >= 16, then the C
means of columns if R >= 16; all low bytes, then all high bytes. Means that are not stored are zero.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import Codec
from hf_trainweights.checkpoint.codecs.coding.blocks import (
    BlockReader,
    BlockWriter,
    bytes_to_int16,
    int16_to_bytes,
    tiles,
)

MEAN_UNITS = 128
"""Means are whole multiples of 1 / MEAN_UNITS."""

MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
"""An octave, a factor of two, is so many bits high in the bit pattern of a float."""

# Rows and columns of fewer elements have no mean: it costs more than it saves.
_FEWEST_PER_MEAN = 16
# The mean of a column is taken over at most this many rows that are not zero.
_ROWS_PER_COLUMN_MEAN = 128
# The mean of a row is taken over at most this many columns.
_COLUMNS_PER_ROW_MEAN = 64
# Most elements whose logarithms are in memory at once.
_SUMMED_TILE = 1 << 17
_BIASES = {torch.float32: 127, torch.bfloat16: 127, torch.float16: 15}
# Rough logarithms are multiples of 2**-9, so float32 sums of 128 of them are exact in any order.
_LOG_BITS = 9


def log_means(original: Tensor, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """Return the means of log2 of a matrix's rows, int32 [R], and columns, int32 [C], in units of 1/128.

    They are multiples of `multiple`, and clipped so that 2 to the power of each mean is a normal float32.
    """
    R, C = original.shape
    row_means, column_means = torch.zeros(R, dtype=torch.int32), torch.zeros(C, dtype=torch.int32)
    sample = original[:, :: -(-C // _COLUMNS_PER_ROW_MEAN)]
    counts = torch.zeros(R, dtype=torch.float32)
    for rows, _ in tiles(R, sample.shape[1], _SUMMED_TILE):
        logs, counts[rows] = _rough_logs(sample[rows], 1)
        if C >= _FEWEST_PER_MEAN:
            row_means[rows] = _fixed_point(logs.sum(1), counts[rows], multiple)
    if R >= _FEWEST_PER_MEAN:
        sampled = counts.nonzero().view(-1)  # rows that are not zero
        sampled = sampled[:: -(-len(sampled) // _ROWS_PER_COLUMN_MEAN) or 1]
        width = max(_SUMMED_TILE // max(len(sampled), 1), 1)
        for column in range(0, C, width):
            columns = slice(column, column + width)
            elements = original[:, columns].index_select(0, sampled)
            residuals, used_counts = _rough_logs(elements, 0, row_means[sampled, None])
            column_means[columns] = _fixed_point(residuals.sum(0), used_counts, multiple)
    return row_means, column_means


def encode_means(row_means: Tensor, column_means: Tensor) -> Tensor:
    """Return the payload of the means that `log_means` returned."""
    R, C = len(row_means), len(column_means)
    stored = torch.cat([row_means[: _stored(R, C)], column_means[: _stored(C, R)]])
    writer = BlockWriter()
    writer.write(int16_to_bytes(stored.to(torch.int16).numpy()))
    return writer.payload()


def decode_means(codec: type[Codec], payload: Tensor, R: int, C: int) -> tuple[Tensor, Tensor]:
    """Undo `encode_means`; means that are not stored are zero. CorruptFileError: the payload does not fit the shape."""
    rows, columns = _stored(R, C), _stored(C, R)
    planes = BlockReader(codec, payload, 1).read(0, 2 * (rows + columns))
    means = torch.from_numpy(bytes_to_int16(planes)).to(torch.int32)
    row_means, column_means = torch.zeros(R, dtype=torch.int32), torch.zeros(C, dtype=torch.int32)
    row_means[:rows] = means[:rows]
    column_means[:columns] = means[rows:]
    return row_means, column_means


def predictions(row_means: Tensor, column_means: Tensor, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return two terms whose sum predicts a bit pattern: of rows [R, 1] and columns [C], words of the dtype's size."""
    octave = 1 << MANTISSA_BITS[dtype]
    unit = octave // MEAN_UNITS
    rows, columns = (row_means * unit + _BIASES[dtype] * octave)[:, None], column_means * unit
    return rows.numpy().astype(f"i{dtype.itemsize}"), columns.numpy().astype(f"i{dtype.itemsize}")


def _rough_logs(values: Tensor, dim: int, means: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return log2 of the magnitudes minus `means`, and along `dim` the number of values but zeros, both float32.

    The logarithm is read from a float's bits, correct to within .09. It is 0 for zeros and NaN.
    """
    x = np.ascontiguousarray(values.to(torch.float32).abs().numpy())
    bits = x.view(np.int32) >> (23 - _LOG_BITS)
    logs = torch.from_numpy(np.multiply(bits, np.float32(2**-_LOG_BITS), dtype=np.float32, casting="unsafe")).sub_(127)
    if means is not None:
        logs.sub_(means.to(torch.float32) / MEAN_UNITS)
    is_used = torch.from_numpy((x > 0).astype(np.float32))
    return logs.mul_(is_used), is_used.sum(dim)


def _fixed_point(sums: Tensor, counts: Tensor, multiple: int) -> Tensor:
    means = (sums / counts.clamp(min=1)).clamp_(-126, 127)
    return means.mul_(MEAN_UNITS / multiple).round_().mul_(multiple).to(torch.int32)


def _stored(means: int, elements_per_mean: int) -> int:
    """Return the number of stored means of rows or of columns: all of them, or 0."""
    return means if elements_per_mean >= _FEWEST_PER_MEAN else 0
