"""How a kernel may hold the stored tensors of a weight in memory; no file and no user of a weight ever sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True)
class Layout(ABC):
    """A kernel's private order of a format's stored tensors, as a value: exact both ways.

    The held tensors keep the names of the stored ones, the dtype of the scales, and the leading dimensions that count
    experts.
    """

    name: ClassVar[str]

    @abstractmethod
    def from_canonical(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return new tensors that hold stored ones in this layout.

        Args:
            tensors: The stored tensors of a format for which the kernel chose this layout.
        """

    @abstractmethod
    def to_canonical(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return new stored tensors, exactly those that were brought into this layout.

        Args:
            held: Tensors in this layout.
        """

    @abstractmethod
    def take_rows(self, held: Mapping[str, Tensor], indices: Tensor) -> dict[str, Tensor]:
        """Return new stored tensors of some rows.

        Args:
            held: Tensors in this layout, of a weight `[N, K]`.
            indices: Integers `[n]`.

        Raises:
            IndexError: An index is negative or not below N, as for `F.embedding`.
        """
