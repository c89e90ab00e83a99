"""`activations="float8"` on a CPU: every way to a product rounds each row of x to float8 with one scale."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from weights import random_weight

from hf_trainweights import QuantizedTensor
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.kernels import linear, stored
from hf_trainweights.testing.values import assert_close_product

FORM = Float8E4M3(activations="float8")
every_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)


@every_dtype
@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("with_gradient", [False, True])
def test_products_are_those_of_rounded_rows(with_gradient: bool, rows: int, dtype: torch.dtype) -> None:
    weight = QuantizedTensor.quantize(random_weight(80, 96, dtype=dtype), FORM)
    x, bias = random_weight(rows, 96, dtype=dtype, seed=1), random_weight(80, dtype=dtype, seed=2)
    unit = x.float().abs().amax(-1, keepdim=True) / 448
    rounded = ((x.float() / unit).to(torch.float8_e4m3fn).float() * unit).to(dtype)
    dense = F.linear(rounded, weight.dequantize(), bias)
    exact = F.linear(rounded.double(), weight.dequantize(torch.float64), bias.double())
    with torch.set_grad_enabled(with_gradient):
        assert_close_product(F.linear(x, weight, bias).detach(), dense, exact)
    result = linear(x, weight.tensors, FORM, bias)
    assert result is not None
    assert_close_product(result, dense, exact)


@every_dtype
def test_a_row_of_zeros_is_zero_and_one_that_is_not_finite_is_nan(dtype: torch.dtype) -> None:
    x = random_weight(4, 96, dtype=dtype)
    expected = stored.round_to_float8(x)
    x[1], x[2, 5], x[3, 6] = 0, torch.inf, torch.nan
    rounded = stored.round_to_float8(x)
    assert torch.equal(rounded[0], expected[0])
    assert not rounded[1].any()
    assert rounded[2].isnan().any()
    assert rounded[3].isnan().any()


def test_what_is_rounded_says_so_and_stores_the_same() -> None:
    weight = random_weight(8, 96)
    assert str(FORM) == "float8_e4m3 with float8 activations"
    assert FORM.get_config() == {"format": "float8_e4m3", "activations": "float8"}
    assert torch.equal(FORM.quantize(weight)["scale"], Float8E4M3().quantize(weight)["scale"])
