"""Formats that change the columns of a weight, by factors or by their order, and leave the rest to another format."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from hf_trainweights.formats.base import Format, Specs
from hf_trainweights.formats.unpacked import Unpacked


@dataclass(frozen=True)
class Wrapper(Format):
    """Another format, the inner one, with one more stored tensor, `[*, 1, K]`, that all rows share.

    `ColumnScaled` divides each column by its factor, `ColumnOrdered` puts columns into another order.

    Args:
        inner: The format of the changed columns.
    """

    # The name of the one more stored tensor. A configuration of the format has this key, too, with the value true.
    added_name: ClassVar[str]
    inner: Format

    @abstractmethod
    def added_dtype(self, scale_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the one more stored tensor."""

    @abstractmethod
    def inputs(self, x: Tensor, added: Tensor) -> Tensor:
        """Return the input `[*, K]` with which the inner format's weight gives the product of `x` and this weight.

        `x` is a float tensor `[*, K]`, and `added` the one more stored tensor of a matrix, `[1, K]`.
        """

    @property
    def name(self) -> str:  # type: ignore[override]  (an attribute of the class in Format)
        """The inner format's name."""
        return self.inner.name

    @property
    def tensor_names(self) -> tuple[str, ...]:  # type: ignore[override]  (likewise)
        """The inner format's stored tensors and one more."""
        return (*self.inner.tensor_names, self.added_name)

    @property
    def shared_names(self) -> tuple[str, ...]:  # type: ignore[override]  (likewise)
        """The inner format's shared tensors and one more."""
        return (*self.inner.shared_names, self.added_name)

    @property
    def is_coded_in_files(self) -> bool:  # type: ignore[override]  (likewise)
        """Whether files keep the inner format entropy-coded."""
        return self.inner.is_coded_in_files

    @property
    def is_import_only(self) -> bool:  # type: ignore[override]  (likewise)
        """Whether weights of the inner format come from files alone."""
        return self.inner.is_import_only

    @property
    def bit_packed(self) -> Mapping[str, int]:  # type: ignore[override]  (likewise)
        """The inner format's tensors of one code for each group."""
        return self.inner.bit_packed

    @property
    def column_step(self) -> int:
        """The inner format's step at which columns can be cut."""
        return self.inner.column_step

    def groups_in(self, columns: int) -> int:
        """Return the inner format's number of groups in `columns` columns of a row."""
        return self.inner.groups_in(columns)

    def get_config(self) -> dict[str, Any]:
        """Return the inner format's JSON description with one more key, which is true."""
        return {**self.inner.get_config(), self.added_name: True}

    def for_new_values(self) -> Self:
        """Return this format with the inner one's `for_new_values`, to which new values are quantized."""
        return replace(self, inner=self.inner.for_new_values())

    def tensor_specs(self, shape: Sequence[int], scale_dtype: torch.dtype) -> Specs:
        """Return the inner format's stored tensors and one more, `[*, 1, K]`."""
        *lead, _, K = shape
        added = {self.added_name: ((*lead, 1, K), self.added_dtype(scale_dtype))}
        return {**self.inner.tensor_specs(shape, scale_dtype), **added}

    def file_bytes(self, shape: Sequence[int], scale_dtype: torch.dtype) -> int:
        """Return the approximate number of bytes of a weight in a file, those of all columns included."""
        added_bytes = math.prod((*shape[:-2], shape[-1])) * self.added_dtype(scale_dtype).itemsize
        return self.inner.file_bytes(shape, scale_dtype) + added_bytes

    def shape_of(self, qdata: Tensor) -> tuple[int, ...]:
        """Return the shape of the stored weight that a `qdata` tensor of the inner format holds."""
        return self.inner.shape_of(qdata)

    def quantize_rows(self, rows: Tensor, amax: Tensor, out: Mapping[str, Tensor]) -> None:
        """Let the inner format quantize rows in which the caller has changed the columns."""
        self.inner.quantize_rows(rows, amax, out)

    def unpack(self, tensors: Mapping[str, Tensor]) -> Unpacked | None:
        """Return the inner format's codes and scales, those of the changed columns."""
        return self.inner.unpack(tensors)
