"""int8 kernels: each path against the exact product, as an op of PyTorch, compiled, and on one thread and two."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from cpus import AMX, COOPER_LAKE, GENOA, ICE_LAKE, needs_integer_products, use_cpu
from helpers import assert_close_product
from torch import Tensor, nn
from weights import random_weight

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, quantize_
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.kernels import digits, int8, linear, prepare_few_rows

# PyTorch's own ops are the subject here: test_compiled.py tests the compiled products.
pytestmark = pytest.mark.usefixtures("without_compiled")

every_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)

# On both sides of every threshold, and more than one block of rows.
ROWS = [1, 3, 4, 5, 32, 33, 48, 49, 130, 513]


@pytest.fixture(autouse=True)
def small_weights_take_every_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let digits be written for weights of any size; a test of the sizes themselves asks for `real_thresholds`."""
    if "real_thresholds" not in request.fixturenames:
        for name in ("_CAST_WEIGHTS", "_ONE_DIGIT_WEIGHTS", "_DIGIT_COLUMNS"):
            monkeypatch.setattr(int8, name, 0)


@pytest.fixture
def real_thresholds() -> None:
    """Leave the sizes as they are."""


@pytest.fixture(
    params=[
        pytest.param("AMX", marks=needs_integer_products),
        pytest.param("VNNI", marks=needs_integer_products),
        "neither",
    ]
)
def integer_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the ways of CPUs with these instructions."""
    for module in (int8, digits):
        monkeypatch.setattr(module, "has_amx", lambda: request.param == "AMX")
    monkeypatch.setattr(int8, "has_integer_products", lambda: request.param != "neither")


@pytest.fixture(params=[True, False], ids=["AMX", "VNNI"])
def amx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Multiply integers, as a CPU with AMX does and as one without."""
    for module in (int8, digits):
        monkeypatch.setattr(module, "has_amx", lambda: request.param)
    monkeypatch.setattr(int8, "has_integer_products", lambda: True)
    return request.param


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


@every_dtype
@pytest.mark.parametrize("rows", ROWS)
def test_every_number_of_rows_keeps_the_bound(rows: int, dtype: torch.dtype, integer_products: None) -> None:
    assert_linear(x(rows, 96, dtype=dtype), quantized(80, 96, dtype))


@every_dtype
@pytest.mark.parametrize("shape", [(1, 1), (1, 257), (257, 1), (33, 65), (200, 300)])
def test_every_shape_keeps_the_bound(shape: tuple[int, int], dtype: torch.dtype, integer_products: None) -> None:
    for rows in (1, 7, 70):
        assert_linear(x(rows, shape[1], dtype=dtype), quantized(*shape, dtype), x(shape[0], dtype=dtype, seed=2))


@every_dtype
def test_blocks_are_put_together(dtype: torch.dtype, integer_products: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_RESULT_ELEMENTS", "_STAGE_ELEMENTS", "_COLUMN_WEIGHTS", "_COLUMN_CODES"):
        monkeypatch.setattr(digits, name, 1)
    for name in ("_CAST_ELEMENTS", "_COPIED_CODES"):
        monkeypatch.setattr(int8, name, 1)
    for rows in (1, 6, 100):
        assert_linear(x(rows, 64, dtype=dtype), quantized(200, 64, dtype), x(200, dtype=dtype, seed=2))


@every_dtype
@pytest.mark.parametrize("rows", [5, 32, 33, 48])
@pytest.mark.parametrize("activations", [None, "int8"])
def test_integer_products_are_given_dense_matrices(
    activations: str | None, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With strides between the digits PyTorch multiplies one by one: 600 ms instead of .9.
    strides: list[int] = []

    def multiply(first: Tensor, second: Tensor, **out: Tensor) -> Tensor:
        strides.extend((first.stride(1), second.stride(0)))
        return torch._int_mm(first, second, **out)

    monkeypatch.setattr(int8, "has_integer_products", lambda: True)
    monkeypatch.setattr(digits, "_int_mm", SimpleNamespace(default=multiply, out=multiply))
    F.linear(x(rows, 96, dtype=dtype), quantized(80, 96, dtype, Int8(activations=activations)))
    assert strides == [1, 1]


@pytest.mark.parametrize("rows", [5, 9, 10])
def test_a_cast_weight_on_the_left_gives_contiguous_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "has_integer_products", lambda: False)
    for elements in (1, int8._CAST_ELEMENTS):
        monkeypatch.setattr(int8, "_CAST_ELEMENTS", elements)
        for bias in (None, x(200, dtype=torch.bfloat16, seed=2)):
            assert_linear(x(rows, 96, dtype=torch.bfloat16), quantized(200, 96, torch.bfloat16), bias)


@every_dtype
@pytest.mark.parametrize("shape", [(96,), (2, 3, 96), (0, 96), (2, 0, 96), (1, 1, 1, 96)])
def test_batches_keep_their_dimensions(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert_linear(x(*shape, dtype=dtype), quantized(80, 96, dtype), x(80, dtype=dtype, seed=2))


@every_dtype
@pytest.mark.parametrize("rows", [2, 20, 100])
def test_strides_do_not_matter(rows: int, dtype: torch.dtype) -> None:
    weight = quantized(80, 96, dtype)
    for inputs in (x(96, rows, dtype=dtype).t(), x(2 * rows, 192, dtype=dtype)[::2, ::2], x(1, 96).to(dtype)):
        assert torch.equal(F.linear(inputs, weight), F.linear(inputs.contiguous(), weight))
    assert_linear(x(rows, 96, dtype=dtype), quantized(160, 96, dtype)[::2])
    repeated = x(1, 96, dtype=dtype).expand(rows, 96)
    assert torch.equal(F.linear(repeated, weight), F.linear(repeated.contiguous(), weight))


@every_dtype
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_threads_keep_the_bound(rows: int, dtype: torch.dtype, threads: int) -> None:
    assert_linear(x(rows, 512, dtype=dtype), quantized(512, 512, dtype), x(512, dtype=dtype, seed=2))


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


@every_dtype
@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_shows(value: float, rows: int, dtype: torch.dtype, integer_products: None) -> None:
    inputs = x(rows, 96, dtype=dtype)
    expected = F.linear(inputs, quantized(80, 96, dtype))
    inputs[0, 3] = value
    result = F.linear(inputs, quantized(80, 96, dtype))
    assert not result[0].isfinite().any()
    assert torch.equal(result[1:], expected[1:])


@every_dtype
@pytest.mark.parametrize("offset", [2, 8, 16])
@pytest.mark.parametrize("rows", [1, 4, 5, 70])
def test_addresses_do_not_matter(rows: int, offset: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(tensor: Tensor) -> Tensor:
        offset_elements = max(1, offset // tensor.element_size())
        memory = torch.empty(tensor.numel() + offset_elements, dtype=tensor.dtype)
        return memory[offset_elements:].view(tensor.shape).copy_(tensor)

    weight, inputs = quantized(80, 96, dtype), x(rows, 96, dtype=dtype)
    expected = F.linear(inputs, weight)
    monkeypatch.setattr(digits, "_RESULT_ELEMENTS", 96 * 33)
    assert torch.equal(F.linear(moved(inputs), weight.map(moved)), expected)


@every_dtype
def test_zeros_give_zeros(dtype: torch.dtype, integer_products: None) -> None:
    for rows in (1, 5, 70):
        assert not F.linear(x(rows, 96, dtype=dtype) * 0, quantized(80, 96, dtype)).any()


def test_a_scale_of_another_dtype_is_used_as_it_is() -> None:
    narrow, wide = quantized(80, 96, torch.bfloat16).float(), quantized(80, 96, torch.float32).bfloat16()
    assert isinstance(narrow, QuantizedTensor)
    assert isinstance(wide, QuantizedTensor)
    for rows in (1, 5, 70):
        assert_linear(x(rows, 96), narrow)
        assert_linear(x(rows, 96, dtype=torch.bfloat16), wide)
    assert linear(x(1, 96, dtype=torch.bfloat16), wide.tensors, wide.format, None) is None
    assert linear(x(1, 96), narrow.tensors, narrow.format, None) is not None


def test_groups_are_left_to_the_caller() -> None:
    weight = quantized(80, 96, torch.float32, Int8(group_size=32))
    assert linear(x(1, 96), weight.tensors, weight.format, None) is None


# int8 activations


def relative_error(result: Tensor, exact: Tensor) -> float:
    return ((result.double() - exact).norm() / exact.norm()).item()


@needs_integer_products
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_int8_activations_leave_few_rows_as_they_are_with_amx_a_single_one_too(
    rows: int, dtype: torch.dtype, amx: bool
) -> None:
    weight, inputs = quantized(80, 96, dtype, Int8(activations="int8")), x(rows, 96, dtype=dtype)
    if amx or rows > 1:
        assert_linear(inputs, weight)
    else:
        exact = inputs.double() @ weight.dequantize(torch.float64).t()
        assert 3e-3 < relative_error(F.linear(inputs, weight), exact) < 1.5e-2


@needs_integer_products
@every_dtype
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.usefixtures("amx")
def test_int8_activations_round_each_token_to_int8(rows: int, dtype: torch.dtype) -> None:
    # 90 columns: never taken by the op for few rows.
    weight, inputs = quantized(80, 90, dtype, Int8(activations="int8")), x(rows, 90, dtype=dtype)
    rounded = inputs.float() / (inputs.float().abs().amax(-1, keepdim=True) / 127)
    top = inputs.double().abs().amax(-1, keepdim=True) / 127
    expected = (rounded.round().double() * top) @ weight.dequantize(torch.float64).t()
    result = F.linear(inputs, weight)
    # Half a step of each token's largest value, 127 steps: uniform rounding of a normal row is about 1 % of its norm.
    assert relative_error(result, inputs.double() @ weight.dequantize(torch.float64).t()) < 1.5e-2
    assert relative_error(result, expected) <= max(2e-3, torch.finfo(dtype).eps)


@every_dtype
def test_int8_activations_are_not_rounded_where_no_product_of_integers_is_faster(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8, "has_integer_products", lambda: False)
    for rows in (5, 70):
        assert_linear(x(rows, 96, dtype=dtype), quantized(80, 96, dtype, Int8(activations="int8")))


@pytest.mark.parametrize("cpu", [AMX, GENOA, COOPER_LAKE, ICE_LAKE])
@pytest.mark.usefixtures("real_thresholds")
def test_what_is_multiplied_by_digits(cpu: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "has_integer_products", lambda: True)
    use_cpu(cpu, monkeypatch)
    amx, many = cpu is AMX, cpu not in (AMX, GENOA)

    def ways(N: int, K: int, dtype: torch.dtype, quantize_x: bool = False) -> list[bool]:
        return [int8._prefers_digits(M, N, K, dtype, quantize_x) for M in (1, 48, 49)]

    for dtype in FLOAT_DTYPES:
        assert ways(384, 384, dtype) == ways(1 << 20, 1, dtype) == [False] * 3
    assert ways(1536, 384, torch.float32) == ways(1536, 384, torch.bfloat16) == [True, True, False]
    assert ways(4096, 4096, torch.bfloat16) == [True, True, many]
    assert ways(4096, 4096, torch.float32) == ways(4096, 4096, torch.bfloat16, quantize_x=True) == [True] * 3
    assert ways(1024, 1024, torch.bfloat16, quantize_x=True) == [True, True, not amx]


@pytest.mark.parametrize("cpu", [AMX, ICE_LAKE])
@pytest.mark.usefixtures("real_thresholds")
def test_which_rows_the_op_multiplies(cpu: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "has_integer_products", lambda: True)
    use_cpu(cpu, monkeypatch)

    def ways(K: int, dtype: torch.dtype, quantize_x: bool = False) -> list[bool]:
        return [int8._prefers_pack(M, 1024, K, dtype, quantize_x) for M in (1, 4, 5)]

    assert ways(1024, torch.bfloat16) == ways(128, torch.float16, quantize_x=True) == [True, True, False]
    assert ways(1024, torch.float16, quantize_x=True) == [cpu is AMX, True, False]
    assert ways(1024, torch.float32) == ways(1000, torch.bfloat16) == [False] * 3


@every_dtype
@pytest.mark.usefixtures("real_thresholds")
@pytest.mark.parametrize("shape", [(384, 384), (1100, 520), (700, 768)])
def test_the_real_thresholds_keep_the_bound(shape: tuple[int, int], dtype: torch.dtype) -> None:
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


@every_dtype
@pytest.mark.parametrize("quantize_x", [True, False])
def test_the_op_passes_the_checks_of_pytorch(quantize_x: bool, dtype: torch.dtype) -> None:
    weight = quantized(80, 96, dtype)
    for rows in (0, 1, 5, 70):
        arguments = (x(rows, 96, dtype=dtype), weight.qdata, weight.scale, x(80, dtype=dtype), quantize_x)
        torch.library.opcheck(int8.LINEAR, arguments)


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
    expected = int8.LINEAR(inputs, weight.qdata, weight.scale, bias, False)
    with mode():
        assert torch.equal(F.linear(inputs, weight, bias), expected)
        assert torch.equal(torch.addmm(bias, inputs, weight.t()), expected)
        assert torch.equal(F.linear(inputs[None], weight, bias)[0], expected)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        (Int8(), torch.bfloat16),
        (Int8(), torch.float32),
        (Int8(activations="int8"), torch.float32),
        (Int8(activations="int8"), torch.bfloat16),
        (Int4(), torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.usefixtures("amx")
def test_few_rows_are_multiplied_at_once_with_the_bits_of_the_op(form: Format, dtype: torch.dtype) -> None:
    weight = QuantizedTensor.quantize(random_weight(128, 128, dtype=dtype), form)
    held, layout = weight.in_layout(weight.best_layout()).held
    bias = x(128, dtype=dtype, seed=2)
    at_once = prepare_few_rows(held, form, layout, dtype)
    assert at_once is not None
    for shape in [(1, 128), (2, 2, 128), (128,)]:
        for added in (None, bias):
            inputs = x(*shape, dtype=dtype)
            result = at_once(inputs, added)
            assert result is not None
            expected = linear(inputs, held, form, layout, added)
            assert expected is not None
            assert torch.equal(result, expected)
            assert result.shape == expected.shape
    assert at_once(x(0, 128, dtype=dtype), None) is None
    assert at_once(x(33, 128, dtype=dtype), None) is None
    assert at_once(x(128, 2, dtype=dtype).t(), None) is None


def test_float32_has_few_rows_only_where_integers_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "has_integer_products", lambda: False)
    assert prepare_few_rows(quantized(80, 96, torch.float32).tensors, Int8(), None, torch.float32) is None


def test_few_rows_follow_what_the_weight_holds() -> None:
    first, second = quantized(80, 96, torch.bfloat16), quantized(80, 96, torch.bfloat16).mul(-1)
    second = QuantizedTensor.quantize(second, Int8())
    inputs = x(1, 96, dtype=torch.bfloat16)
    with torch.no_grad():
        before = F.linear(inputs, first)
        first.copy_(second)
        assert torch.equal(F.linear(inputs, first), -before)
        first.data = quantized(80, 96, torch.bfloat16)
        assert torch.equal(F.linear(inputs, first), before)
        first.qdata = second.qdata
        assert torch.equal(F.linear(inputs, first), -before)
    assert prepare_few_rows(first.tensors, Int8(), None, torch.float16) is None
