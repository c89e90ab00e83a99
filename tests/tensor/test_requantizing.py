"""Weights that are changed in float are quantized again as they were, and what did not change keeps every bit."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from covering import by_default
from torch import nn
from weights import FORMS, KINDS, LAYOUTS, quantized_weight, same_bytes, same_stored

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, quantize_
from hf_trainweights.errors import QuantizationError
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.tensor.requantizing import in_float, requantize, rounding_said_once


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(128, 64)
    quantize_(layer, TrainWeightsConfig("int8"))
    return layer


def quantized(layer: nn.Module) -> QuantizedTensor:
    weight = layer.weight
    assert isinstance(weight, QuantizedTensor)
    return weight


def change(layer: nn.Linear, value: float, *rows: int | slice) -> None:
    """Add to rows of a layer, one after the other, while it is held in float."""
    with in_float(layer, ["weight"]):
        assert type(layer.weight) is nn.Parameter
        for row in rows:
            layer.weight.data[row] += value


QUANTIZED = [name for name, form in FORMS.items() if not form.is_import_only]


@pytest.mark.slow
@pytest.mark.parametrize("form", by_default(KINDS, QUANTIZED))
def test_changed_rows_are_quantized_anew_and_the_others_keep_every_bit(form: str) -> None:
    for layout, dtype in itertools.product(LAYOUTS, FLOAT_DTYPES):
        weight = quantized_weight(form, layout, dtype)
        values = weight.dequantize()
        rows = values.mT if weight.transposed else values
        rows[..., 2, :] += 0.25
        result = requantize(weight, values)
        fresh = QuantizedTensor.quantize(values, weight.format, weight.transposed, beside=weight.tensors)
        assert (result.format, result.shape, result.dtype) == (weight.format, weight.shape, dtype)
        for name, stored in result.tensors.items():
            if name in weight.format.shared_names:
                assert same_bytes(stored, weight.tensors[name])
                continue
            for row in range(rows.shape[-2]):
                expected = fresh if row == 2 else weight
                assert same_bytes(stored[..., row, :], expected.tensors[name][..., row, :]), (name, row)


@pytest.mark.slow
@pytest.mark.parametrize("form", [name for name, form in FORMS.items() if form.is_import_only])
def test_a_changed_weight_of_an_import_only_format_gets_the_nearest_format(form: str) -> None:
    for layout, dtype in itertools.product(LAYOUTS, FLOAT_DTYPES):
        weight = quantized_weight(form, layout, dtype)
        values = weight.dequantize() * 1.5
        result = requantize(weight, values)
        wanted = weight.format.for_new_values()
        assert not wanted.is_import_only
        assert (result.format, result.shape, result.dtype) == (wanted, weight.shape, dtype)
        # The new format has as many codes, in groups of the same size, so it keeps the values about as well.
        assert (result.dequantize().float() - values.float()).norm() < 0.2 * values.float().norm()


@pytest.mark.slow
@pytest.mark.parametrize("form", QUANTIZED)
def test_a_weight_of_more_or_fewer_rows_keeps_those_that_it_had(form: str) -> None:
    for count in (3, 9):
        weight = quantized_weight(form)
        values = torch.ones(count, weight.shape[1])
        kept = min(count, weight.shape[0])
        values[:kept] = weight.dequantize()[:kept]
        result = requantize(weight, values)
        assert result.shape == values.shape
        assert same_stored(result[:kept], weight[:kept])
        # Equal values are one code, but not once their columns are divided by the factors of the other rows.
        rtol = 0.4 if weight.format.shared_names else 0.01
        if "group_scale" in weight.format.tensor_names:
            # A group scale of a few bits meets no value exactly.
            rtol = max(rtol, 0.05)
        torch.testing.assert_close(result.dequantize()[kept:], values[kept:], rtol=rtol, atol=0)


def test_a_weight_that_shows_another_dtype_keeps_that_of_its_scales() -> None:
    weight = quantized_weight(dtype=torch.bfloat16).to(torch.float32)
    result = requantize(weight, weight.dequantize() * 2)
    assert (result.dtype, result.scale_dtype) == (torch.float32, torch.bfloat16)


def test_a_weight_is_float_within_the_context_and_the_same_parameter_afterwards(layer: nn.Linear) -> None:
    parameter, before = layer.weight, quantized(layer).clone()
    with pytest.warns(UserWarning, match="1 quantized weights were changed"):
        change(layer, 1.0, slice(5))
    assert layer.weight is parameter
    assert same_stored(quantized(layer)[5:], before[5:])
    torch.testing.assert_close(quantized(layer).dequantize()[:5], before.dequantize()[:5] + 1, rtol=0, atol=0.01)


def test_a_weight_that_nobody_changes_keeps_its_memory_and_nothing_is_said(layer: nn.Linear) -> None:
    held = quantized(layer).held
    with in_float(layer, ["weight"]):
        layer.weight.sum()
    assert quantized(layer).held is held


def test_an_error_within_the_context_changes_no_weight(layer: nn.Linear) -> None:
    parameter, before = layer.weight, quantized(layer).clone()
    with pytest.raises(IndexError, match="out of bounds"):
        change(layer, 1.0, 0, 64)
    with pytest.raises(QuantizationError, match="NaN"):
        change(layer, torch.nan, 0)
    assert layer.weight is parameter
    assert same_stored(quantized(layer), before)


def test_what_rounding_costs_is_said_once_with_its_share_of_the_change(layer: nn.Linear) -> None:
    other = nn.Linear(128, 64)
    quantize_(other, TrainWeightsConfig("int4", group_size=32))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with rounding_said_once(), rounding_said_once():
            before = [quantized(each).dequantize() for each in (layer, other)]
            for each in (layer, other):
                with in_float(each, ["weight"]):
                    each.weight.data += 0.01 * torch.randn(64, 128)
                    before.append(each.weight.data.clone())
    old, wanted = torch.stack(before[:2]), torch.stack(before[2:])
    error = (torch.stack([quantized(each).dequantize() for each in (layer, other)]) - wanted).norm()
    [message] = [str(warning.message) for warning in caught]
    assert message.startswith("2 quantized weights were changed and rounded to int4 g32, int8 again.")
    assert f"error of rounding is {error / wanted.norm():.2g}, which is {error / (wanted - old).norm():.2g} times" in (
        message
    )
