"""Products with column scales: as near as the dequantized product, with gradients, and compiled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from weights import random_weight

from hf_trainweights import QuantizedTensor
from hf_trainweights.formats import get_format
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES

INNER = {
    "int8": {"format": "int8"},
    "int8_g32": {"format": "int8", "group_size": 32},
    "int4": {"format": "int4", "group_size": 32},
    "codebook4": {"format": "codebook4"},
}
# Below and above the sizes at which kernels change their way.
ROWS = (1, 4, 64)
N, K = 640, 512

each_inner = pytest.mark.parametrize("inner", INNER)
each_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)


def column_scaled(inner: str, dtype: torch.dtype) -> QuantizedTensor:
    """Return a weight whose columns differ by a factor of ten."""
    values = random_weight(N, K) * torch.logspace(-1, 0, K)
    return QuantizedTensor.quantize(values.to(dtype), get_format({**INNER[inner], "column_scale": True}))


def error(result: Tensor, exact: Tensor) -> float:
    return ((result.double() - exact).norm() / exact.norm()).item()


@pytest.mark.slow
@pytest.mark.covering(2)
@each_inner
@each_dtype
@pytest.mark.parametrize("rows", ROWS)
def test_a_product_is_as_near_as_the_dequantized_one(inner: str, dtype: torch.dtype, rows: int) -> None:
    weight, x = column_scaled(inner, dtype), random_weight(rows, K, dtype=dtype, seed=1)
    exact = F.linear(x.double(), weight.dequantize(torch.float64))
    with torch.no_grad():
        found = error(F.linear(x, weight), exact)
    assert found <= max(1.5 * error(F.linear(x, weight.dequantize()), exact), 1e-6)


@pytest.mark.slow
@each_inner
@each_dtype
def test_gradients_are_as_near_as_those_of_the_dequantized_weight(inner: str, dtype: torch.dtype) -> None:
    weight, upstream = column_scaled(inner, dtype), random_weight(3, N, dtype=dtype, seed=1)
    exact = upstream.double() @ weight.dequantize(torch.float64)
    x = random_weight(3, K, dtype=dtype, seed=2).requires_grad_()
    F.linear(x, weight).backward(upstream)
    assert x.grad is not None
    assert error(x.grad, exact) <= max(1.5 * error(upstream @ weight.dequantize(), exact), 1e-6)


@pytest.mark.slow
@each_inner
@each_dtype
def test_rows_are_looked_up(inner: str, dtype: torch.dtype) -> None:
    weight, indices = column_scaled(inner, dtype), torch.tensor([[5, 0], [639, 5]])
    assert torch.equal(F.embedding(indices, weight), weight.dequantize()[indices])


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["int8", "int4"])
def test_a_compiled_layer_computes_as_the_layer_does(inner: str) -> None:
    layer = nn.Linear(K, N, dtype=torch.bfloat16).requires_grad_(False)
    layer.weight = nn.Parameter(column_scaled(inner, torch.bfloat16), requires_grad=False)
    x = random_weight(7, K, dtype=torch.bfloat16, seed=2)
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
        torch.testing.assert_close(compiled, layer(x))
