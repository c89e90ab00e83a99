"""Cutting columns of formats that pack several into a word, or that share a scale: exact, or refused."""

from __future__ import annotations

import itertools
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from weights import FORMS, Packed, random_weight, weight_of

from hf_trainweights.errors import QuantizationError
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.column_scale import ColumnScaled
from hf_trainweights.formats.cutting import can_cut_columns, cut_columns
from hf_trainweights.formats.table4 import Table4
from hf_trainweights.testing.values import assert_same


def test_ordered_columns_are_cut_together_or_not_at_all() -> None:
    form = FORMS["int4_column_order"]
    stored = weight_of(form, (6, 256)).tensors
    assert_same(cut_columns(form, stored, (6, 256), 0, 256), stored)
    with pytest.raises(QuantizationError, match="at which its stored tensors can be cut for int4 g32 with"):
        cut_columns(form, stored, (6, 256), 0, 128)


@pytest.mark.parametrize("groups", [6, 96, 320, 512])
def test_a_part_with_nested_scales_has_the_values_of_the_weight_or_is_refused(groups: int) -> None:
    form, K = Table4(8, "nested"), 8 * groups
    # The first groups of rows lie where those of a whole weight do, in runs of 256.
    stored = weight_of(form, (4, K)).tensors
    stored["phase"].copy_((torch.arange(4) * groups % 256).unsqueeze(-1))
    whole, cuts = form.dequantize(stored, (4, K), torch.float32), range(0, K + 1, K // 6 // 8 * 8)
    for start, stop in itertools.combinations(cuts, 2):
        if can_cut_columns(form, K, start, stop):
            part = cut_columns(form, stored, (4, K), start, stop)
            assert torch.equal(form.dequantize(part, (4, stop - start), torch.float32), whole[:, start:stop])


@pytest.mark.parametrize("name", FORMS)
def test_columns_of_a_weight_of_another_program_are_cut_exactly(name: str) -> None:
    form, shape = FORMS[name], (6, 512)
    stored, step = weight_of(form, shape).tensors, form.column_step
    whole = form.dequantize(stored, shape, torch.float32)
    for start, stop in ((0, 256), (256, 512), (step, 512 - step)):
        # A part of nested scales may begin within a run that the whole weight shares.
        if can_cut_columns(form, 512, start, stop) or name not in ("table4_nested", "int4_column_order"):
            part = cut_columns(form, stored, shape, start, stop)
            assert torch.equal(form.dequantize(part, (6, stop - start), torch.float32), whole[:, start:stop])


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
