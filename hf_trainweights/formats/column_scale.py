"""A factor for each input column beside a weight in any other format: `weight = codes * scale * column_scale`.

| tensor | shape | dtype |
|---|---|---|
| `column_scale` | `[*, 1, K]`, shared by all rows | the weight's dtype |
| stored tensors of the inner format | as there | as there |

Columns of a weight can differ much in size, and a group of columns has one scale for all. So each column is divided by
its factor before the inner format quantizes, and the values of a group are of one size. A product, here `F.linear`,
multiplies its input by the factors and leaves the rest to the inner format: `x @ (W * c).T == (x * c) @ W.T`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_trainweights.formats.arithmetic import FLOAT_DTYPES, largest_magnitude
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.columns import ColumnCodes, FileBits
from hf_trainweights.formats.wrapper import Wrapper

COLUMN_SCALE = "column_scale"

# The factors are chosen from this many rows, evenly spaced: 256 rows tell the size of a column to 5 %. On MiniLM in
# int4 g64 the mean cosine is .9806 with all rows, .9811 with 512 or 256, .9804 with 128.
_SAMPLED_ROWS = 256
# Each round divides columns, then rows, by their standard deviations. Mean cosine: .9799 by 1, .9803 by 2, 3, 6 and 12.
_ROUNDS = 2
# The largest factor of a weight is at most this many times the smallest.
_SPREAD = 64.0


@dataclass(frozen=True)
class ColumnScaled(Wrapper):
    """Another format with a factor for each input column.

    Args:
        inner: The format of the weight whose columns are divided by their factors.
    """

    added_name: ClassVar[str] = COLUMN_SCALE
    has_independent_rows: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"{self.inner} with column scales"

    def added_dtype(self, scale_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the weight, or float32 if the scales are no floats."""
        return scale_dtype if scale_dtype in FLOAT_DTYPES else torch.float32

    def inputs(self, x: Tensor, added: Tensor) -> Tensor:
        """Return an input times the column scales, rounded once.

        In a 16-bit dtype this is one rounding more. A product with the dequantized weight has it, too, in the weight.
        The whole error stays below 1.5 times that of such a product, plus half a step of the integers to which a
        compiled product rounds x (tests/kernels).
        """
        return (x * added.view(-1)).to(x.dtype)

    def fallback(self, shape: Sequence[int]) -> Format:
        """Return the inner format's fallback, with column scales if the weight has two rows and two columns."""
        inner = self.inner.fallback(shape)
        return ColumnScaled(inner) if shape[-2] > 1 and shape[-1] > 1 else inner

    def quantize(
        self, weight: Tensor, name: str = "weight", shared: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Quantize as `Format.quantize` does, with the factors of `shared`, or newly chosen ones if it has none."""
        self.check_weight(weight, name)
        weight = weight.detach()
        out, lead = self.empty(weight.shape, weight.dtype, weight.device), weight.shape[:-2]
        # One matrix after the other, because dividing a matrix makes a copy of it.
        for index in itertools.product(*map(range, lead)):
            matrix = weight[index]
            factors = shared[COLUMN_SCALE][index] if shared and COLUMN_SCALE in shared else choose_column_scale(matrix)
            stored = self.inner.quantize(_divide(matrix, factors), name)
            for key, tensor in {**stored, COLUMN_SCALE: factors}.items():
                out[key][index].copy_(tensor)
        return out

    def columns(self, weight: Tensor, importance: Tensor) -> ColumnCodes | None:
        """Return an object that chooses the inner format's codes of divided columns; None if that format has none."""
        factors = choose_column_scale(weight)
        wide = factors.float().flatten()
        inner = self.inner.columns(_divide(weight, factors), importance * wide.square())
        return None if inner is None else _Columns(inner, factors)

    def dequantize_rows(self, tensors: Mapping[str, Tensor], K: int, dtype: torch.dtype) -> Tensor:
        """Return the inner format's float32 values times `column_scale`, rounded to float32 and then to `dtype`."""
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        values = self.inner.dequantize_rows(tensors, K, exact)
        return values.mul_(tensors[COLUMN_SCALE].to(exact)).to(dtype)


class _Columns(ColumnCodes):
    """Chooses the inner format's codes for columns divided by their factors."""

    def __init__(self, inner: ColumnCodes, factors: Tensor):
        self._inner, self._factors = inner, factors
        self._wide = factors.float().flatten()
        self.group_size = inner.group_size

    def begin_group(self, group: int, values: Tensor) -> None:
        """Let the inner format choose the scale of a group."""
        first = group * len(values)
        self._inner.begin_group(group, values / self._wide[first : first + len(values)].unsqueeze(-1))

    def encode(self, column: int, values: Tensor) -> Tensor:
        """Let the inner format choose the codes."""
        factor = self._wide[column]
        return self._inner.encode(column, values / factor).mul_(factor)

    def again(self, file_bits: FileBits) -> bool:
        """Return whether the inner format wants all columns once more; it is told a file size with the factors."""
        return self._inner.again(lambda tensors: file_bits({**tensors, COLUMN_SCALE: self._factors}))

    def tensors(self) -> dict[str, Tensor]:
        """Return the inner format's tensors and the factors."""
        return {**self._inner.tensors(), COLUMN_SCALE: self._factors}


def _divide(matrix: Tensor, factors: Tensor) -> Tensor:
    """Divide the columns of a matrix by their factors, in its dtype; NaN and Inf stay."""
    divided = matrix.float() / factors.float()
    # A quotient may lie beyond the dtype's range. A matrix with Inf is left to the inner format's error.
    if largest_magnitude(matrix.contiguous()).amax().isfinite():
        divided.clamp_(-torch.finfo(matrix.dtype).max, torch.finfo(matrix.dtype).max)
    return divided.to(matrix.dtype)


def choose_column_scale(matrix: Tensor) -> Tensor:
    """Return the factors `[1, K]` of a weight: the standard deviations of its columns after its rows are made alike.

    The largest factor is over 1/2 and at most 1, so that no activation overflows when it is multiplied. The smallest is
    at least 1/64 of the largest. A column of equal values has the geometric mean of the other factors.
    """
    # In float64, so that the order in which a processor adds does not show in the rounded factors.
    sample = matrix[:: -(-len(matrix) // _SAMPLED_ROWS)].double()
    squares = sample.square()
    rows, factors = sample.new_ones(len(sample)), sample.new_ones(sample.shape[1])
    for _ in range(_ROUNDS):
        factors = _spread(rows.pow(-2) @ squares, rows.reciprocal() @ sample, len(sample))
        rows = _spread(squares @ factors.pow(-2), sample @ factors.reciprocal(), sample.shape[1])
    factors = factors.clamp_min(factors.amax() / _SPREAD)
    # A power of two changes no rounding. A number just below 1 may be rounded to 1.
    return (factors * torch.exp2(-factors.amax().log2().ceil())).to(matrix.dtype).unsqueeze(0)


def _spread(squares: Tensor, sums: Tensor, count: int) -> Tensor:
    """Return standard deviations from sums of squares and sums; for equal numbers the geometric mean of the others."""
    variance = squares / count - (sums / count).square()
    # Equal numbers have a variance of 0 but for rounding, which this bound excludes.
    varies = variance > 1e-10 * squares / count
    mean_log = torch.where(varies, variance, 1.0).log().sum() / varies.sum().clamp_min(1)
    return torch.where(varies, variance, mean_log.exp()).sqrt()
