"""Cutting stored tensors: the parts are those of the whole weight, bit for bit."""

from __future__ import annotations

import itertools
from typing import ClassVar

import pytest
import torch
from helpers import stored_bits
from torch import Tensor
from weights import FORMS, Packed, random_weight, weight_of

from hf_trainweights.errors import QuantizationError
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.column_scale import ColumnScaled
from hf_trainweights.formats.cutting import can_cut_columns, cut_columns, cut_rows, join_columns
from hf_trainweights.formats.table4 import Table4

each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
SHAPES = [(6, 256), (2, 6, 256)]


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert {name: stored_bits(tensor) for name, tensor in left.items()} == {
        name: stored_bits(tensor) for name, tensor in right.items()
    }


# In a format with ordered columns, those of a part lie anywhere.
each_cuttable_form = pytest.mark.parametrize(
    "form", [form for form in FORMS.values() if form.has_cuttable_columns], ids=str
)


@pytest.mark.slow
@each_cuttable_form
def test_columns_that_are_cut_are_those_of_the_weight_and_come_together_again(form) -> None:
    for shape in SHAPES:
        stored = weight_of(form, shape).tensors
        whole = form.dequantize(stored, shape, torch.float32)
        parts = [cut_columns(form, stored, shape, start, start + 128) for start in (0, 128)]
        half = (*shape[:-1], 128)
        assert torch.equal(torch.cat([form.dequantize(part, half, torch.float32) for part in parts], -1), whole)
        assert all(tensor.is_contiguous() for part in parts for tensor in part.values())
        assert_same(join_columns(form, parts, [128, 128]), stored)


@pytest.mark.slow
@each_cuttable_form
def test_columns_are_cut_at_every_step(form) -> None:
    for shape in SHAPES:
        stored, step = weight_of(form, shape).tensors, form.column_step
        whole = form.dequantize(stored, shape, torch.float32)
        part = cut_columns(form, stored, shape, step, 256 if step == 128 else 256 - step)
        width = part["qdata"].shape[-1] * 256 // stored["qdata"].shape[-1]
        values = form.dequantize(part, (*shape[:-1], width), torch.float32)
        assert torch.equal(values, whole[..., step : step + width])


@pytest.mark.slow
@each_form
def test_rows_that_are_cut_are_those_of_the_weight(form) -> None:
    for shape in SHAPES:
        stored = weight_of(form, shape).tensors
        part = cut_rows(form, stored, lambda tensor: tensor[..., 1:3, :])
        values = form.dequantize(part, (*shape[:-2], 2, 256), torch.float32)
        assert torch.equal(values, form.dequantize(stored, shape, torch.float32)[..., 1:3, :])


@pytest.mark.slow
@pytest.mark.covering(1)
@each_form
@pytest.mark.parametrize(("start", "stop"), [(0, 257), (-32, 32), (64, 64), (128, 0)])
def test_columns_outside_the_weight_are_refused(form, start: int, stop: int) -> None:
    with pytest.raises(QuantizationError, match="a part of 256 columns at multiples of"):
        cut_columns(form, weight_of(form, (6, 256)).tensors, (6, 256), start, stop)


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
