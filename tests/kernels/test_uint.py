"""Compiled products with uint2 to uint6 weights: as exact as dequantizing, the same bits by every way."""

from __future__ import annotations

import math

import pytest
import torch
from cpus import GRAVITON, use_cpu
from helpers import assert_close_products
from torch import Tensor, nn
from torch.nn import functional as F
from weights import random_weight

from hf_trainweights import QuantizedTensor
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.uint import UInt, UInt2, UInt3, UInt4, UInt5, UInt6
from hf_trainweights.kernels import compiled, linear, prepare_few_rows, slowness
from hf_trainweights.tensor.dispatch import FALLBACKS

every_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
FORMATS = [form(group_size) for form in (UInt2, UInt3, UInt4, UInt5, UInt6) for group_size in (16, 32)]
ROWS = (1, 2, 3, 4, 5, 16, 49)


def product(x: Tensor, tensors: dict[str, Tensor], form: UInt, bias: Tensor | None = None) -> Tensor:
    multiply = prepare_few_rows(tensors, form, x.dtype)
    assert multiply is not None
    out, by_op = multiply(x, bias), linear(x, tensors, form, bias)
    assert by_op is not None
    found = compiled.find(form, *form.shape_of(tensors["qdata"]), x.dtype, tensors["scale"].dtype)
    assert found is not None
    assert (out is None) == (x.numel() > found.most_rows * x.shape[-1])
    if out is None:
        return by_op
    torch.testing.assert_close(out, by_op, rtol=0, atol=0, equal_nan=True)
    return out


@pytest.mark.slow
@pytest.mark.covering(2)
@pytest.mark.usefixtures("library", "threads")
@every_dtype
@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize(("N", "K"), [(3, 64), (50, 192), (20, 1088)])
def test_products_are_as_exact_as_dequantizing(form: UInt, N: int, K: int, dtype: torch.dtype) -> None:
    tensors = form.quantize(random_weight(N, K, dtype=dtype))
    weight = form.dequantize(tensors, (N, K), torch.float32)
    assert_close_products(lambda x, bias: product(x, tensors, form, bias), weight, dtype, ROWS)


@pytest.mark.slow
@pytest.mark.covering(2)
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_the_largest_sums_fit(form: UInt) -> None:
    N, K = 2, 1 << 16
    # Codes, zero points and group scales at their ends, of both signs.
    rows = torch.full((N, K), 1.0)
    rows[1] = -1
    rows[:, :: form.group_size] *= -1
    tensors = form.quantize(rows)
    for pairs in ("group_scale", "zero_point"):
        tensors[pairs].fill_(0xFF if pairs == "group_scale" else 0)
    tensors["qdata"].fill_(-1)
    for x in (torch.ones(1, K), -torch.ones(4, K)):
        exact = x.double() @ form.dequantize(tensors, (N, K), torch.float64).t()
        torch.testing.assert_close(product(x, tensors, form).double(), exact, rtol=1e-5, atol=0)


@pytest.mark.usefixtures("library")
@every_dtype
@pytest.mark.parametrize("form", [UInt3(), UInt4()], ids=str)
def test_a_row_without_a_finite_magnitude_becomes_nan_and_no_other(form: UInt, dtype: torch.dtype) -> None:
    tensors, x = form.quantize(random_weight(20, 64, dtype=dtype)), random_weight(6, 64, dtype=dtype)
    x[1, 3], x[4, 60] = math.nan, math.inf
    assert product(x, tensors, form).isnan().float().mean(1).tolist() == [0, 1, 0, 0, 1, 0]


@pytest.mark.slow
@pytest.mark.covering(2)
@pytest.mark.usefixtures("library")
@every_dtype
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_layer_multiplies_few_rows_without_dequantizing(form: UInt, dtype: torch.dtype) -> None:
    layer = nn.Linear(64, 48).to(dtype)
    layer.weight = nn.Parameter(QuantizedTensor.quantize(layer.weight.detach(), form), requires_grad=False)
    FALLBACKS.clear()
    for x in (torch.randn(2, 7, 64).to(dtype), torch.randn(64).to(dtype), torch.randn(0, 64).to(dtype)):
        with torch.no_grad():
            at_once = layer(x)
        assert torch.equal(at_once, layer(x))  # by way of autograd and the dispatcher
        if x.numel():
            assert torch.equal(at_once, product(x, layer.weight.tensors, form, layer.bias.detach()))
    assert not FALLBACKS


@pytest.mark.usefixtures("library")
def test_a_gradient_flows_to_the_input() -> None:
    form, x = UInt4(), torch.randn(3, 64, requires_grad=True)
    weight = QuantizedTensor.quantize(random_weight(20, 64), form)
    F.linear(x, weight).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight.dequantize().sum(0).expand(3, 64), rtol=1e-4, atol=1e-4)


def test_without_panels_many_rows_are_multiplied_with_the_dequantized_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cpu(GRAVITON, monkeypatch)
    form, x = UInt3(), random_weight(17, 64)
    tensors = form.quantize(random_weight(20, 64))
    multiply = prepare_few_rows(tensors, form, torch.float32)
    assert multiply is not None
    assert multiply(x, None) is None
    expected = F.linear(x, form.dequantize(tensors, (20, 64), torch.float32))
    torch.testing.assert_close(linear(x, tensors, form), expected)
    assert linear(x[:0], tensors, form, None).shape == (0, 20)
    assert "takes longer" in (slowness(form, torch.float32) or "")


@pytest.mark.usefixtures("without_compiled")
@every_dtype
def test_without_the_library_blocks_are_dequantized(dtype: torch.dtype) -> None:
    form = UInt5()
    tensors = form.quantize(random_weight(20, 64, dtype=dtype))
    weight = form.dequantize(tensors, (20, 64), torch.float32)
    assert prepare_few_rows(tensors, form, dtype) is None
    assert_close_products(lambda x, bias: linear(x, tensors, form, bias), weight, dtype, ROWS)
    assert "each product dequantizes" in (slowness(form, dtype) or "")
