"""int8 where nothing is compiled: each way against the exact product, as an op, and on one thread and two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from cpus import AMX, ICE_LAKE, use_cpu
from helpers import assert_close_product
from torch import Tensor, nn
from weights import random_weight

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, quantize_
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.kernels import stored

every_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)

# On both sides of every threshold, and more than one block of rows.
ROWS = [1, 3, 4, 5, 49, 130]


@pytest.fixture(params=[AMX, ICE_LAKE], ids=["fast in bfloat16", "slow in it"], autouse=True)
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the ways of each CPU in an installation without a C compiler."""
    use_cpu(request.param, monkeypatch, is_compiled=False)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


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


@pytest.mark.covering(2)
@every_dtype
@pytest.mark.parametrize("rows", ROWS)
def test_every_number_of_rows_keeps_the_bound(rows: int, dtype: torch.dtype) -> None:
    assert_linear(x(rows, 96, dtype=dtype), quantized(80, 96, dtype))


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


@pytest.mark.slow
@every_dtype
@pytest.mark.parametrize("shape", [(96,), (2, 3, 96), (0, 96), (2, 0, 96), (1, 1, 1, 96)])
def test_batches_keep_their_dimensions(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert_linear(x(*shape, dtype=dtype), quantized(80, 96, dtype), x(80, dtype=dtype, seed=2))


@pytest.mark.slow
@every_dtype
@pytest.mark.parametrize("rows", [2, 20, 100])
def test_strides_do_not_matter(rows: int, dtype: torch.dtype) -> None:
    weight = quantized(80, 96, dtype)
    for inputs in (x(96, rows, dtype=dtype).t(), x(2 * rows, 192, dtype=dtype)[::2, ::2], x(1, 96).to(dtype)):
        assert torch.equal(F.linear(inputs, weight), F.linear(inputs.contiguous(), weight))
    assert_linear(x(rows, 96, dtype=dtype), quantized(160, 96, dtype)[::2])
    repeated = x(1, 96, dtype=dtype).expand(rows, 96)
    assert torch.equal(F.linear(repeated, weight), F.linear(repeated.contiguous(), weight))


@pytest.mark.covering(2)
@every_dtype
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_threads_keep_the_bound(rows: int, dtype: torch.dtype, threads: int) -> None:
    assert_linear(x(rows, 512, dtype=dtype), quantized(512, 512, dtype), x(512, dtype=dtype, seed=2))


@pytest.mark.slow
@every_dtype
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_very_large_and_very_small_rows_keep_their_precision(rows: int, dtype: torch.dtype) -> None:
    size = 2.0**-6 if dtype == torch.float16 else 2.0**-60
    inputs = x(rows, 96, dtype=dtype) * torch.tensor([size, 1.0, 1 / size]).to(dtype).repeat(rows)[:rows, None]
    weight = quantized(80, 96, dtype)
    for row in range(rows):
        assert_linear(inputs[row : row + 1], weight)
    result, exact = F.linear(inputs, weight).double(), inputs.double() @ weight.dequantize(torch.float64).t()
    relative = (result - exact).norm(dim=1) / exact.norm(dim=1)
    assert relative.max() <= (1e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps)


@pytest.mark.covering(2)
@every_dtype
@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_shows(value: float, rows: int, dtype: torch.dtype) -> None:
    inputs = x(rows, 96, dtype=dtype)
    expected = F.linear(inputs, quantized(80, 96, dtype))
    inputs[0, 3] = value
    result = F.linear(inputs, quantized(80, 96, dtype))
    assert result[0].isnan().all()
    assert torch.equal(result[1:], expected[1:])


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


@every_dtype
def test_zeros_give_zeros(dtype: torch.dtype) -> None:
    for rows in (1, 5, 70):
        assert not F.linear(x(rows, 96, dtype=dtype) * 0, quantized(80, 96, dtype)).any()


def test_a_scale_of_another_dtype_is_used_as_it_is() -> None:
    narrow, wide = quantized(80, 96, torch.bfloat16).float(), quantized(80, 96, torch.float32).bfloat16()
    assert isinstance(narrow, QuantizedTensor)
    assert isinstance(wide, QuantizedTensor)
    for rows in (1, 5, 70):
        assert_linear(x(rows, 96), narrow)
        assert_linear(x(rows, 96, dtype=torch.bfloat16), wide)


@every_dtype
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_groups_keep_the_bound(rows: int, dtype: torch.dtype) -> None:
    assert_linear(x(rows, 96, dtype=dtype), quantized(80, 96, dtype, Int8(group_size=24)), x(80, dtype=dtype, seed=2))


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


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(384, 384), (1100, 520), (700, 768)])
@every_dtype
def test_larger_weights_keep_the_bound(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for rows in (1, 5, 70):
        assert_linear(x(rows, shape[1], dtype=dtype), quantized(*shape, dtype))


def test_int8_activations_change_nothing_that_is_stored() -> None:
    plain, active = quantized(8, 32, torch.float32), quantized(8, 32, torch.float32, Int8(activations="int8"))
    assert torch.equal(plain.qdata, active.qdata)
    assert torch.equal(plain.dequantize(), active.dequantize())
    assert str(active.format) == "int8 with int8 activations"
    assert plain.format.get_config() == {"format": "int8", "group_size": None}


def test_int8_activations_are_in_the_summary() -> None:
    summary = quantize_(nn.Linear(8, 8), TrainWeightsConfig("int8", activations="int8"))
    assert "1 int8 with int8 activations" in str(summary)


# As an op


@pytest.mark.slow
@pytest.mark.covering(1)
@every_dtype
@pytest.mark.parametrize("quantize_x", [True, False])
def test_the_op_passes_the_checks_of_pytorch(quantize_x: bool, dtype: torch.dtype) -> None:
    weight = quantized(80, 96, dtype)
    for rows in (0, 1, 5, 70):
        arguments = (
            x(rows, 96, dtype=dtype),
            [weight.qdata, weight.scale],
            x(80, dtype=dtype),
            stored.config_of(Int8(None, "int8" if quantize_x else None)),
        )
        torch.library.opcheck(stored.LINEAR, arguments)


@pytest.mark.slow
@every_dtype
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_the_gradient_of_x_keeps_the_bound(rows: int, dtype: torch.dtype) -> None:
    weight, inputs = quantized(80, 96, dtype), x(rows, 96, dtype=dtype)
    upstream = x(rows, 80, dtype=dtype, seed=3)

    def gradient(v: Tensor, w: Tensor) -> Tensor:
        leaf = v.clone().requires_grad_()
        F.linear(leaf, w).backward(upstream.to(v.dtype))
        assert leaf.grad is not None
        return leaf.grad

    dense = gradient(inputs, weight.dequantize())
    assert_close_product(gradient(inputs, weight), dense, gradient(inputs.double(), weight.dequantize(torch.float64)))


@pytest.mark.slow
@every_dtype
def test_it_compiles_to_one_graph_for_all_rows(dtype: torch.dtype) -> None:
    weight, bias = quantized(80, 96, dtype), x(80, dtype=dtype, seed=2)
    graphs = []

    def backend(graph: torch.fx.GraphModule, example_inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(F.linear, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for rows in (2, 5, 70):
            inputs = x(rows, 96, dtype=dtype)
            assert torch.equal(compiled(inputs, weight, bias), F.linear(inputs, weight, bias))
    assert len(graphs) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_all_ways_to_the_kernel_give_equal_bits(mode: type) -> None:
    weight, inputs, bias = quantized(80, 96, torch.bfloat16), x(3, 96).bfloat16(), x(80).bfloat16()
    expected = stored.LINEAR(inputs, [weight.qdata, weight.scale], bias, stored.config_of(weight.format))
    with mode():
        assert torch.equal(F.linear(inputs, weight, bias), expected)
        assert torch.equal(torch.addmm(bias, inputs, weight.t()), expected)
        assert torch.equal(F.linear(inputs[None], weight, bias)[0], expected)
