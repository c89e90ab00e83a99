"""int8 where nothing is compiled: weights of any shape, PyTorch's op for few rows, and activations of 8 bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cpus import AMX, ICE_LAKE, use_cpu
from torch import Tensor, nn
from weights import random_weight

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, quantize_
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.kernels import stored
from hf_trainweights.testing.values import assert_close_product

every_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)

# On both sides of every threshold, and more than one block of rows.
ROWS = [1, 3, 4, 5, 49, 130]


@pytest.fixture(params=[AMX, ICE_LAKE], ids=["fast in bfloat16", "slow in it"], autouse=True)
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the ways of each CPU in an installation without a C compiler."""
    use_cpu(request.param, monkeypatch, is_compiled=False)


def quantized(N: int, K: int, dtype: torch.dtype, form: Int8 | None = None) -> QuantizedTensor:
    return QuantizedTensor.quantize(random_weight(N, K, dtype=dtype), form or Int8())


def x(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return random_weight(*shape, dtype=dtype, seed=seed)


def assert_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    assert isinstance(weight, QuantizedTensor)
    with torch.no_grad():
        result = F.linear(inputs, weight, bias)
        dense = F.linear(inputs, weight.dequantize(), bias)
        wide = None if bias is None else bias.double()
        exact = F.linear(inputs.double(), weight.dequantize(torch.float64), wide)
    assert result.is_contiguous()
    assert_close_product(result, dense, exact)


@pytest.mark.slow
@pytest.mark.covering(2)
@every_dtype
@pytest.mark.parametrize("shape", [(1, 1), (1, 257), (257, 1), (33, 65), (200, 300)])
def test_every_shape_keeps_the_bound(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for rows in (1, 7, 70):
        assert_linear(x(rows, shape[1], dtype=dtype), quantized(*shape, dtype), x(shape[0], dtype=dtype, seed=2))


@every_dtype
def test_blocks_are_put_together(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_BLOCK_ELEMENTS", "_BLOCK_ROWS"):
        monkeypatch.setattr(stored, name, 1)
    for rows in (1, 6, 100):
        assert_linear(x(rows, 64, dtype=dtype), quantized(200, 64, dtype), x(200, dtype=dtype, seed=2))


def test_codes_are_copied_only_where_pytorchs_op_would_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def multiply(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        read.append(codes.data_ptr())
        return x.new_zeros(len(x), len(codes))

    monkeypatch.setattr(torch.ops.aten, "_weight_int8pack_mm", multiply)
    memory = torch.zeros(64 * 64 + 32, dtype=torch.int8)
    for offset in range(33):
        codes = memory[offset : offset + 64 * 64].view(64, 64)
        stored._multiply_packed(x(1, 64, dtype=torch.bfloat16), codes, x(64, 1, dtype=torch.bfloat16), None)
        assert (read.pop() == codes.data_ptr()) == (codes.data_ptr() % 16 == 0)


@pytest.mark.parametrize("rows", [5, 9, 10])
def test_a_weight_on_the_left_gives_contiguous_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for elements in (1, stored._BLOCK_ELEMENTS):
        monkeypatch.setattr(stored, "_BLOCK_ELEMENTS", elements)
        for bias in (None, x(200, dtype=torch.bfloat16, seed=2)):
            assert_linear(x(rows, 96, dtype=torch.bfloat16), quantized(200, 96, torch.bfloat16), bias)


@pytest.mark.covering(2)
@every_dtype
@pytest.mark.parametrize("offset", [2, 8, 16])
@pytest.mark.parametrize("rows", [1, 4, 5, 70])
def test_addresses_do_not_matter(rows: int, offset: int, dtype: torch.dtype) -> None:
    def moved(tensor: Tensor) -> Tensor:
        offset_elements = max(1, offset // tensor.element_size())
        memory = torch.empty(tensor.numel() + offset_elements, dtype=tensor.dtype)
        return memory[offset_elements:].view(tensor.shape).copy_(tensor)

    weight, inputs = quantized(80, 96, dtype), x(rows, 96, dtype=dtype)
    expected = F.linear(inputs, weight)
    assert torch.equal(F.linear(moved(inputs), weight.map(moved)), expected)


# int8 activations


def relative_error(result: Tensor, exact: Tensor) -> float:
    return ((result.double() - exact).norm() / exact.norm()).item()


@pytest.mark.covering(2)
@every_dtype
@pytest.mark.parametrize("K", [90, 96])  # PyTorch's op for few rows takes the second
@pytest.mark.parametrize("rows", ROWS)
def test_int8_activations_round_each_token_to_int8(rows: int, K: int, dtype: torch.dtype) -> None:
    weight, inputs = quantized(80, K, dtype, Int8(activations="int8")), x(rows, K, dtype=dtype)
    rounded = inputs.float() / (inputs.float().abs().amax(-1, keepdim=True) / 127)
    top = inputs.double().abs().amax(-1, keepdim=True) / 127
    expected = (rounded.round().double() * top) @ weight.dequantize(torch.float64).t()
    result = F.linear(inputs, weight)
    # Half a step of each token's largest value, 127 steps: uniform rounding of a normal row is about 1 % of its norm.
    assert relative_error(result, inputs.double() @ weight.dequantize(torch.float64).t()) < 1.5e-2
    assert relative_error(result, expected) <= max(2e-3, torch.finfo(dtype).eps)


def test_int8_activations_change_nothing_that_is_stored() -> None:
    plain, active = quantized(8, 32, torch.float32), quantized(8, 32, torch.float32, Int8(activations="int8"))
    assert torch.equal(plain.qdata, active.qdata)
    assert torch.equal(plain.dequantize(), active.dequantize())
    assert str(active.format) == "int8 with int8 activations"
    assert plain.format.get_config() == {"format": "int8", "group_size": None}


def test_int8_activations_are_in_the_summary() -> None:
    summary = quantize_(nn.Linear(8, 8), TrainWeightsConfig("int8", activations="int8"))
    assert "1 int8 with int8 activations" in str(summary)
