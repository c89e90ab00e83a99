"""Cutting stored tensors: the parts are those of the whole weight, bit for bit."""

from __future__ import annotations

import pytest
import torch
from helpers import stored_bits
from torch import Tensor
from weights import FORMS, random_weight

from hf_trainweights.errors import QuantizationError
from hf_trainweights.formats.cutting import cut_columns, cut_rows, join_columns

each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
SHAPES = [(6, 256), (2, 6, 256)]


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert {name: stored_bits(tensor) for name, tensor in left.items()} == {
        name: stored_bits(tensor) for name, tensor in right.items()
    }


@pytest.mark.slow
@each_form
def test_columns_that_are_cut_are_those_of_the_weight_and_come_together_again(form) -> None:
    for shape in SHAPES:
        stored = form.quantize(random_weight(*shape))
        whole = form.dequantize(stored, shape, torch.float32)
        parts = [cut_columns(form, stored, shape, start, start + 128) for start in (0, 128)]
        half = (*shape[:-1], 128)
        assert torch.equal(torch.cat([form.dequantize(part, half, torch.float32) for part in parts], -1), whole)
        assert all(tensor.is_contiguous() for part in parts for tensor in part.values())
        assert_same(join_columns(form, parts, [128, 128]), stored)


@pytest.mark.slow
@each_form
def test_columns_are_cut_at_every_step(form) -> None:
    for shape in SHAPES:
        stored, step = form.quantize(random_weight(*shape)), form.column_step
        whole = form.dequantize(stored, shape, torch.float32)
        part = cut_columns(form, stored, shape, step, 256 if step == 128 else 256 - step)
        width = part["qdata"].shape[-1] * 256 // stored["qdata"].shape[-1]
        values = form.dequantize(part, (*shape[:-1], width), torch.float32)
        assert torch.equal(values, whole[..., step : step + width])


@pytest.mark.slow
@each_form
def test_rows_that_are_cut_are_those_of_the_weight(form) -> None:
    for shape in SHAPES:
        stored = form.quantize(random_weight(*shape))
        part = cut_rows(form, stored, lambda tensor: tensor[..., 1:3, :])
        values = form.dequantize(part, (*shape[:-2], 2, 256), torch.float32)
        assert torch.equal(values, form.dequantize(stored, shape, torch.float32)[..., 1:3, :])


@pytest.mark.slow
@pytest.mark.covering(1)
@each_form
@pytest.mark.parametrize(("start", "stop"), [(0, 257), (-32, 32), (64, 64), (128, 0)])
def test_columns_outside_the_weight_are_refused(form, start: int, stop: int) -> None:
    with pytest.raises(QuantizationError, match="a part of 256 columns at multiples of"):
        cut_columns(form, form.quantize(random_weight(6, 256)), (6, 256), start, stop)


def test_parts_of_a_group_are_refused() -> None:
    form = FORMS["int4_g32"]
    with pytest.raises(QuantizationError, match="multiples of 32 for int4 g32, found 0 to 48"):
        cut_columns(form, form.quantize(random_weight(6, 256)), (6, 256), 0, 48)
