"""Codes of a weight chosen column by column, so that later columns can make up for the errors of earlier ones.

Calibration calls this instead of `Format.quantize`. It decides which values a column should have, and the format
decides which scales and codes come nearest to them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from torch import Tensor

# Returns the number of bits that these stored tensors take in a file.
FileBits = Callable[[Mapping[str, Tensor]], float]


class ColumnCodes(ABC):
    """Chooses the codes of one weight `[N, K]`, from the first column to the last.

    The caller calls `begin_group` before the first column of each group, then `encode` for each column. After the last
    column it calls `again`, and begins once more with the first column if that returns True.
    """

    group_size: int | None = None
    """The number of columns that share a scale, which `begin_group` chooses; None if all columns of a row share one."""

    def begin_group(self, group: int, values: Tensor) -> None:  # noqa: B027  (formats without groups leave it empty)
        """Choose the scale of a group from the values that its columns should have, float32 `[group_size, N]`."""

    @abstractmethod
    def encode(self, column: int, values: Tensor) -> Tensor:
        """Choose codes for a column's values `[N]`, a tensor that is not written to; return the values of the codes."""

    def again(self, file_bits: FileBits) -> bool:
        """Return whether the caller has to begin once more with the first column.

        A format asks for that if all codes together show it how to choose better ones, as for a size in the file.

        Args:
            file_bits: Measures the size of stored tensors.
        """
        del file_bits
        return False

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the stored tensors of the weight, like those of `Format.quantize`."""
