"""Cutting columns of formats that pack several into a word, or that share a scale: exact, or refused."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor
from weights import FORMS, Packed, random_weight

from hf_trainweights.errors import QuantizationError
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.column_scale import ColumnScaled
from hf_trainweights.formats.cutting import can_cut_columns, cut_columns


def test_parts_of_a_group_are_refused() -> None:
    form = FORMS["int4_g32"]
    with pytest.raises(QuantizationError, match="multiples of 32 for int4 g32, found 0 to 48"):
        cut_columns(form, form.quantize(random_weight(6, 256)), (6, 256), 0, 48)


class Bytes(Packed):
    name: ClassVar[str] = "bytes"
    count: ClassVar[int] = 4
    word: ClassVar[torch.dtype] = torch.uint8


class Interleaved(Packed):
    """Neighbours lie in words far from each other."""

    def place(self, K: int) -> tuple[Tensor, Tensor]:
        columns, words = torch.arange(K), -(-K // self.count)
        return columns % words, columns // words


@pytest.mark.parametrize("form", [Packed(), Bytes(), Interleaved(), ColumnScaled(Packed())], ids=lambda form: form.name)
def test_a_part_of_a_format_that_packs_columns_has_the_values_of_the_weight_or_is_refused(form: Format) -> None:
    K = 48
    stored = form.quantize(random_weight(6, K))
    whole, found = form.dequantize(stored, (6, K), torch.float32), []
    for start in range(0, K, 4):
        for stop in range(start + 4, K + 1, 4):
            if can_cut_columns(form, K, start, stop):
                found.append((start, stop))
                part = cut_columns(form, stored, (6, K), start, stop)
                values = form.dequantize(part, (6, stop - start), torch.float32)
                assert torch.equal(values, whole[:, start:stop])
            else:
                with pytest.raises(QuantizationError, match="a part of 48 columns at which its stored tensors can be"):
                    cut_columns(form, stored, (6, K), start, stop)
    step = {"bytes": 4}.get(form.name, 16)
    starts = (
        [(0, K)]
        if isinstance(form, Interleaved)
        else [(start, stop) for start in range(0, K, step) for stop in range(start + step, K + 1, step)]
    )
    assert found == starts
