"""Compiled products with uint2 to uint6 weights: as exact as dequantizing, the same bits by every way."""

from __future__ import annotations

import pytest
import torch
from cpus import GRAVITON, use_cpu
from torch import Tensor
from torch.nn import functional as F
from weights import random_weight

from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.uint import UInt, UInt2, UInt3, UInt4, UInt5, UInt6
from hf_trainweights.kernels import compiled, linear, prepare_few_rows, slowness
from hf_trainweights.testing.values import assert_close_products

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
