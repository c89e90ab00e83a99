"""Shared by the codecs of Adam's exp_avg_sq: the means of log2 over rows and columns.

The tensor is viewed as a matrix [R, C] (see `levels`). Means are whole multiples of 1/128, over a sample of the
elements that are positive; the means of rows are taken first, those of columns from the residuals. The payload is one
block (see `blocks`), int16: the R of rows if C >= 16, then the C of columns if R >= 16, in units of 1/128; all low
bytes, then all high. Means that are not stored are zero.
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

# The mean of fewer elements costs more than it saves.
_FEWEST_PER_MEAN = 16
# The mean of a column is taken over at most this many rows that are not zero, that of a row over this many columns.
_ROWS_PER_COLUMN_MEAN = 128
_COLUMNS_PER_ROW_MEAN = 64
# Elements that are worked on at once.
_SUMMED_TILE = 1 << 17
# Rough logarithms are whole multiples of 2**-9: sums of as many as above are exact in float32, in any order.
_LOG_BITS = 9


def log_means(original: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means of a matrix's rows and columns in units of 1/128, int32 [R] and [C], within float32's range."""
    R, C = original.shape
    row_means, column_means = torch.zeros(R, dtype=torch.int32), torch.zeros(C, dtype=torch.int32)
    sample = original[:, :: -(-C // _COLUMNS_PER_ROW_MEAN)]
    counts = torch.zeros(R, dtype=torch.float32)
    for rows, _ in tiles(R, sample.shape[1], _SUMMED_TILE):
        logs, counts[rows] = _rough_logs(sample[rows], 1)
        if C >= _FEWEST_PER_MEAN:
            row_means[rows] = _fixed_point(logs.sum(1), counts[rows])
    if R >= _FEWEST_PER_MEAN:
        live = counts.nonzero().view(-1)
        live = live[:: -(-len(live) // _ROWS_PER_COLUMN_MEAN) or 1]
        width = max(_SUMMED_TILE // max(len(live), 1), 1)
        for column in range(0, C, width):
            columns = slice(column, column + width)
            residuals, present = _rough_logs(original[:, columns].index_select(0, live), 0, row_means[live, None])
            column_means[columns] = _fixed_point(residuals.sum(0), present)
    return row_means, column_means


def encode_means(row_means: Tensor, column_means: Tensor) -> Tensor:
    """Return the payload of the means, as `log_means` returns them."""
    R, C = len(row_means), len(column_means)
    stored = torch.cat([row_means[: _stored(R, C)], column_means[: _stored(C, R)]])
    writer = BlockWriter()
    writer.write(int16_to_bytes(stored.to(torch.int16).numpy()))
    return writer.payload()


def decode_means(codec: type[Codec], payload: Tensor, R: int, C: int) -> tuple[Tensor, Tensor]:
    """Return int32 [R] and [C], zeros where they are not stored; CorruptFileError: they do not fit the shape."""
    rows, columns = _stored(R, C), _stored(C, R)
    planes = BlockReader(codec, payload, 1).read(0, 2 * (rows + columns))
    means = torch.from_numpy(bytes_to_int16(planes)).to(torch.int32)
    row_means, column_means = torch.zeros(R, dtype=torch.int32), torch.zeros(C, dtype=torch.int32)
    row_means[:rows] = means[:rows]
    column_means[:columns] = means[rows:]
    return row_means, column_means


def _rough_logs(values: Tensor, dim: int, means: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return log2 to within .09, float32 read from the bits, less the means, 0 where the value is not positive.

    The second tensor is, along `dim`, how many values are positive.
    """
    x = np.ascontiguousarray(values.to(torch.float32).numpy())
    bits = x.view(np.int32) >> (23 - _LOG_BITS)
    logs = torch.from_numpy(np.multiply(bits, np.float32(2**-_LOG_BITS), dtype=np.float32, casting="unsafe")).sub_(127)
    if means is not None:
        logs.sub_(means.to(torch.float32) / MEAN_UNITS)
    present = torch.from_numpy((x > 0).astype(np.float32))
    return logs.mul_(present), present.sum(dim)


def _fixed_point(sums: Tensor, counts: Tensor) -> Tensor:
    return (sums / counts.clamp(min=1)).clamp_(-126, 127).mul_(MEAN_UNITS).round_().to(torch.int32)


def _stored(means: int, elements_per_mean: int) -> int:
    """Return how many of these means are stored: all or none."""
    return means if elements_per_mean >= _FEWEST_PER_MEAN else 0
