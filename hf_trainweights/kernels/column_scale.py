"""Products of weights with column scales: the input takes the factors, and the inner format's kernel does the rest.

In a 16-bit dtype the factors round the input once. Beside the roundings of the inner kernel that keeps the error of a
product below 1.5 times that of the dequantized product, whose weights are rounded likewise (tests/kernels).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hf_trainweights.formats.column_scale import COLUMN_SCALE
from hf_trainweights.kernels.layouts import Layout


@dataclass(frozen=True)
class WithColumnScale(Layout):
    """The layout of an inner format, with the column scales as they are.

    Args:
        inner: The inner format's layout.
    """

    name: ClassVar[str] = "with_column_scale"
    inner: Layout

    def from_canonical(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the inner format's tensors in its layout, and the column scales."""
        return {**self.inner.from_canonical(tensors), COLUMN_SCALE: tensors[COLUMN_SCALE]}

    def to_canonical(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the inner format's stored tensors, and the column scales."""
        return {**self.inner.to_canonical(held), COLUMN_SCALE: held[COLUMN_SCALE]}

    def take_rows(self, held: Mapping[str, Tensor], indices: Tensor) -> dict[str, Tensor]:
        """Return the inner format's stored tensors of some rows, and the column scales."""
        return {**self.inner.take_rows(held, indices), COLUMN_SCALE: held[COLUMN_SCALE]}


def scale_columns(x: Tensor, held: Mapping[str, Tensor]) -> Tensor:
    """Return an input times the column scales, rounded once.

    Args:
        x: Float `[*, K]`.
        held: The tensors that hold a weight `[N, K]`.

    Returns:
        A new tensor of the shape and dtype of `x`.
    """
    return (x * held[COLUMN_SCALE].view(-1)).to(x.dtype)
