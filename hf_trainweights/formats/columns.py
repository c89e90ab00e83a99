"""Codes of a weight that are chosen column by column, so that later columns can make up for the errors of earlier ones.

A format offers this beside `quantize`. Calibration decides which values a column should have; the format decides which
scales and codes come nearest to them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from torch import Tensor

# Returns how many bits a weight takes in a file whose stored tensors these are.
FileBits = Callable[[Mapping[str, Tensor]], float]


class ColumnCodes(ABC):
    """The codes of one weight `[N, K]`, from the first column to the last.

    Before the first column of each group of `group_size` columns comes `begin_group`, then `encode` for each column.
    After the last column, `again` says whether all columns are to be chosen once more.
    """

    group_size: int | None = None
    """Columns that share a scale, which is chosen from the values they have when the first of them is reached."""

    def begin_group(self, group: int, values: Tensor) -> None:  # noqa: B027  (a format without groups needs none)
        """Choose what the columns of a group share, from what they should be, float32 `[group_size, N]`."""

    @abstractmethod
    def encode(self, column: int, values: Tensor) -> Tensor:
        """Choose codes for a column's values `[N]`, leaving these as they are; return the values of the codes."""

    def again(self, file_bits: FileBits) -> bool:
        """Return whether to choose all columns once more, because the whole shows that other codes are better."""
        del file_bits
        return False

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the stored tensors of the weight, as `Format.quantize` does."""
