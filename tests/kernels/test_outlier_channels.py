"""Products of rows in which one channel is far larger than the others, but hardly matters: its weights are small.

A product of integers writes each number of x as digits of the largest magnitude in its row. Half a step of these is the
error of a number, however small it is itself. The rounding error of a dequantized product knows no such error, so the
promise about products names it beside that: half a step times the sum of the weights' magnitudes for one output, and
times their norm where it is the norm of all outputs, because roundings are independent of each other.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from weights import random_weight

from hf_trainweights import QuantizedTensor
from hf_trainweights.formats import get_format
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES

CONFIGS = {
    "int8": {"format": "int8"},
    "int4_g32": {"format": "int4", "group_size": 32},
    "uint4": {"format": "uint4"},
    "codebook4": {"format": "codebook4"},
    "float8": {"format": "float8_e4m3"},
    "int4_column_scale": {"format": "int4", "group_size": 32, "column_scale": True},
}
# The most that digits are off, in parts of the largest magnitude of a row.
HALF_STEP = {torch.float32: 1 / 16_600_000, torch.bfloat16: 1 / 65_000, torch.float16: 1 / 65_000}
N, K, OUTLIER = 256, 512, 7


@pytest.mark.usefixtures("cpu")
@pytest.mark.covering(2)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.parametrize("small", [0.0, 1e-3, 1.0])
def test_an_error_is_that_of_the_dequantized_product_and_half_a_step_of_the_largest_input(
    name: str, dtype: torch.dtype, rows: int, small: float
) -> None:
    values, x = random_weight(N, K), random_weight(rows, K, seed=1)
    values[:, OUTLIER] *= small
    x[:, OUTLIER] = 1000.0
    weight, x = QuantizedTensor.quantize(values.to(dtype), get_format(CONFIGS[name])), x.to(dtype)
    floats = weight.dequantize(torch.float64)
    exact = F.linear(x.double(), floats)
    with torch.no_grad():
        outputs, dequantized = F.linear(x, weight), F.linear(x, weight.dequantize())
    rounding = max(1.5 * (dequantized.double() - exact).norm(), 1e-6 * exact.norm())
    half_steps = HALF_STEP[dtype] * x.double().abs().amax(-1, keepdim=True)
    assert (outputs.double() - exact).norm() <= rounding + (half_steps * floats.norm(dim=-1)).norm()
    assert ((outputs.double() - exact).abs() <= rounding + half_steps * floats.abs().sum(-1)).all()
