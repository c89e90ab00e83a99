"""Columns in another order beside a weight in any other format, as GPTQ stores them if it quantizes large ones first.

| tensor | shape | dtype |
|---|---|---|
| `column_order` | `[*, 1, K]`, shared by all rows | int32, the weight's column of each stored one |
| stored tensors of the inner format | as there | as there |

GPTQ's act-order gives each column a group by a list, `g_idx`, in no order. Here columns of one group lie side by side.
A product, here `F.linear`, takes the columns of its input in the stored order and leaves the rest to the inner format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.wrapper import Wrapper

COLUMN_ORDER = "column_order"


@dataclass(frozen=True)
class ColumnOrdered(Wrapper):
    """Another format whose columns are stored in an order of their own.

    Args:
        inner: The format of the columns in the stored order.
    """

    added_name: ClassVar[str] = COLUMN_ORDER
    has_independent_rows: ClassVar[bool] = False
    has_cuttable_columns: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"{self.inner} with ordered columns"

    def added_dtype(self, scale_dtype: torch.dtype) -> torch.dtype:
        """Return int32."""
        del scale_dtype
        return torch.int32

    def fallback(self, shape: Sequence[int]) -> Format:
        """Return this format if the inner one can hold the shape, else the inner one's fallback, in no order."""
        inner = self.inner.fallback(shape)
        return self if inner == self.inner else inner

    def check(self, tensors: Mapping[str, Tensor], shape: Sequence[int], name: str = "weight") -> None:
        """Check as `Format.check` does, and that `column_order` has each column once."""
        super().check(tensors, shape, name)
        order = tensors[COLUMN_ORDER]
        # Tensors on the meta device, and those that compilers trace with, have no values.
        if order.is_meta or type(order) not in (Tensor, torch.nn.Parameter):
            return
        columns = torch.arange(shape[-1], dtype=torch.int32, device=order.device)
        if not torch.equal(order.sort(dim=-1).values, columns.expand(order.shape)):
            expected, next_step = f"{COLUMN_ORDER} to hold each of {shape[-1]} columns once", "The file is damaged."
            raise CorruptFileError(name, expected, "another list of numbers", next_step)

    def inputs(self, x: Tensor, added: Tensor) -> Tensor:
        """Return the columns of `x` in the stored order."""
        return x.index_select(-1, added.view(-1))

    def quantize(
        self, weight: Tensor, name: str = "weight", shared: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Quantize as the inner format does, in the order of `shared`, or as columns lie if it has none."""
        self.check_weight(weight, name)
        *lead, _, K = weight.shape
        columns = torch.arange(K, dtype=torch.int32, device=weight.device).expand(*lead, 1, K)
        order = shared[COLUMN_ORDER] if shared and COLUMN_ORDER in shared else columns
        ordered = weight.detach().gather(-1, order.to(torch.int64).expand(weight.shape))
        return {**self.inner.quantize(ordered, name, shared), COLUMN_ORDER: order.clone()}

    def unpack(self, tensors: Mapping[str, Tensor]) -> None:
        """Return None: an export would have to order the columns of each input, too."""
        del tensors

    def dequantize_rows(self, tensors: Mapping[str, Tensor], K: int, dtype: torch.dtype) -> Tensor:
        """Return the inner format's values with each column in its own place."""
        values = self.inner.dequantize_rows(tensors, K, dtype)
        order = tensors[COLUMN_ORDER].to(torch.int64)
        return torch.empty_like(values).scatter_(-1, order.expand(values.shape), values)
