"""A factor for each input column beside a weight in any other format: `weight = codes * scale * column_scale`.

| tensor | shape | dtype |
|---|---|---|
| `column_scale` | `[*, 1, K]`, shared by all rows | the weight's dtype |
| those of the inner format | as there | as there |

Rows of a weight that a scale serves well still have columns of very different size, and a group of columns has one
scale. Dividing each column by its factor first lets the groups hold values of one size. A product multiplies its input
by the factors and leaves the rest to the inner format: `x @ (W * c).T == (x * c) @ W.T`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.formats.base import Format

COLUMN_SCALE = "column_scale"

# Rows that the factors are chosen by, evenly spaced: 1024 tell the size of a column to 2 %.
_SAMPLED_ROWS = 1024
# Each divides the columns, then the rows, by their standard deviations; on MiniLM more change no factor by 1 %.
_ROUNDS = 6
# The largest factor of a weight is at most this many times the smallest.
_SPREAD = 64.0


@dataclass(frozen=True)
class ColumnScaled(Format):
    """Another format with a factor for each input column.

    Args:
        inner: The format of the weight whose columns are divided by their factors.
    """

    inner: Format

    @property
    def name(self) -> str:  # type: ignore[override]  (of the inner format, with one parameter more)
        """The inner format's name."""
        return self.inner.name

    @property
    def tensor_names(self) -> tuple[str, ...]:  # type: ignore[override]  (likewise)
        """The inner format's stored tensors and `column_scale`."""
        return (*self.inner.tensor_names, COLUMN_SCALE)

    @property
    def shared_names(self) -> tuple[str, ...]:  # type: ignore[override]  (likewise)
        """The inner format's shared tensors and `column_scale`."""
        return (*self.inner.shared_names, COLUMN_SCALE)

    @property
    def bit_packed(self) -> Mapping[str, int]:  # type: ignore[override]  (likewise)
        """The inner format's."""
        return self.inner.bit_packed

    @property
    def column_step(self) -> int:
        """The inner format's."""
        return self.inner.column_step

    def __str__(self) -> str:
        return f"{self.inner} with column scales"

    def get_config(self) -> dict[str, Any]:
        """Return the inner format's JSON description with `"column_scale": true`."""
        return {**self.inner.get_config(), COLUMN_SCALE: True}

    def fallback(self, shape: Sequence[int]) -> Format:
        """Return the inner format's fallback with column scales; without them where a weight has no two rows."""
        inner = self.inner.fallback(shape)
        return ColumnScaled(inner) if shape[-2] > 1 and shape[-1] > 1 else inner

    def tensor_specs(
        self, shape: Sequence[int], scale_dtype: torch.dtype
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the inner format's stored tensors and `column_scale` as `[*, 1, K]`."""
        *lead, _, K = shape
        return {**self.inner.tensor_specs(shape, scale_dtype), COLUMN_SCALE: ((*lead, 1, K), scale_dtype)}

    def shape_of(self, qdata: Tensor) -> tuple[int, ...]:
        """Return the shape of the stored weight that a `qdata` tensor of the inner format holds."""
        return self.inner.shape_of(qdata)

    def quantize(self, weight: Tensor, name: str = "weight") -> dict[str, Tensor]:
        """As `Format.quantize`; rows depend on one another by the factors that they share."""
        return self.quantize_beside(weight, {}, name)

    def quantize_beside(self, weight: Tensor, shared: Mapping[str, Tensor], name: str = "weight") -> dict[str, Tensor]:
        """As `Format.quantize_beside`; the factors are chosen where `shared` has none."""
        self.check_weight(weight, name)
        weight = weight.detach()
        out, lead = self.empty(weight.shape, weight.dtype, weight.device), weight.shape[:-2]
        # One matrix after the other, because each is divided in a copy.
        for index in itertools.product(*map(range, lead)):
            matrix = weight[index]
            factors = shared[COLUMN_SCALE][index] if COLUMN_SCALE in shared else choose_column_scale(matrix)
            stored = self.inner.quantize(_divide(matrix, factors), name)
            for key, tensor in {**stored, COLUMN_SCALE: factors}.items():
                out[key][index].copy_(tensor)
        return out

    def quantize_rows(self, rows: Tensor, amax: Tensor, out: Mapping[str, Tensor]) -> None:
        """Quantize rows whose columns are divided already, by the inner format."""
        self.inner.quantize_rows(rows, amax, out)

    def dequantize_rows(self, tensors: Mapping[str, Tensor], K: int, dtype: torch.dtype) -> Tensor:
        """Return the inner format's float32 values times `column_scale`, rounded to float32 and then to `dtype`."""
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        values = self.inner.dequantize_rows(tensors, K, exact)
        return values.mul_(tensors[COLUMN_SCALE].to(exact)).to(dtype)


def _divide(matrix: Tensor, factors: Tensor) -> Tensor:
    """Return the matrix with its columns divided by their factors, in its dtype; not finite where it is not."""
    largest = torch.finfo(matrix.dtype).max
    divided = (matrix.float() / factors.float()).clamp_(-largest, largest).to(matrix.dtype)
    return torch.where(matrix.isinf(), matrix, divided)


def choose_column_scale(matrix: Tensor) -> Tensor:
    """Return the factors of a weight: the standard deviations of its columns once those of its rows are alike.

    Args:
        matrix: Float `[N, K]`, N and K at least 2.

    Returns:
        New `[1, K]` of the weight's dtype: the largest is over 1/2 and at most 1, so that no activation overflows by
        them, the smallest at least 1/64 of it; 1 where a column has no spread to tell its size by.
    """
    sample = matrix[:: -(-len(matrix) // _SAMPLED_ROWS)].double()
    factors = sample.new_ones(1, sample.shape[1])
    rows = sample.new_ones(sample.shape[0], 1)
    for _ in range(_ROUNDS):
        factors = _spread(sample / rows, dim=0)
        rows = _spread(sample / factors, dim=1)
    factors = factors.clamp_min(factors.amax() / _SPREAD)
    # A power of two changes no rounding. bfloat16 rounds numbers just below 1 to 1.
    return (factors * torch.exp2(-factors.amax().log2().ceil())).to(matrix.dtype)


def _spread(values: Tensor, dim: int) -> Tensor:
    """Return standard deviations along a dimension; where there is none, or it is not finite, their mean."""
    spread = values.std(dim=dim, keepdim=True)
    known = (spread > 0) & spread.isfinite()
    usual = torch.where(known, spread.log(), 0).sum() / known.sum().clamp_min(1)
    return torch.where(known, spread, usual.exp())
