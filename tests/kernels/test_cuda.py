"""What runs a product on a GPU, and when: everything but the kernels, on CPU tensors."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from weights import random_weight

from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.kernels import cuda, gpu_tables, linear, prepare_few_rows, stored, triton_launch
from hf_trainweights.kernels.stored import multiply_dequantized
from hf_trainweights.kernels.triton_launch import Run, Stored
from hf_trainweights.testing.values import assert_close_product

every_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
every_form = pytest.mark.parametrize("form", [Int8(), Int8(32), Int4(32)], ids=str)


class FakeKernel:
    """In place of what makes a product in `cuda`: right, wrong or broken, and counting the calls of what it makes."""

    def __init__(self, form: Format, factor: float = 1.0, error: Exception | None = None) -> None:
        self.form, self.factor, self.error, self.rows = form, factor, error, []

    def __call__(self, weight: Stored, M: int, dtype: torch.dtype, tile: Mapping[str, int]) -> Run:
        def run(x: Tensor, bias: Tensor | None) -> Tensor:
            K = weight.K
            assert x.dtype == dtype
            assert x.is_contiguous()
            self.rows.append(x.numel() // K)
            if self.error is not None:
                raise self.error
            exact = self.form.dequantize_rows(weight.tensors, K, torch.float64)
            return (self.factor * F.linear(x.double(), exact, None if bias is None else bias.double())).to(x.dtype)

        return run


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU be a GPU on which nothing has been checked, with Triton but without NVRTC."""
    monkeypatch.setattr(cuda, "_CHECKED", {})
    monkeypatch.setattr(cuda, "_CHOSEN", {})
    monkeypatch.setattr(cuda, "has_triton", lambda index: True)
    monkeypatch.setattr(cuda, "_has_driver", lambda index: False)
    monkeypatch.setattr(cuda, "capability", lambda index: (0, 0))
    monkeypatch.setattr(cuda, "_MAKE", dict(cuda._MAKE))
    # A build of PyTorch without CUDA cannot be asked.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def use(kernel: Callable[..., Any], *ways: str) -> None:
    """Let a kernel multiply in place of those of some ways; by default of Triton's for x that is not rounded."""
    cuda._MAKE.update(dict.fromkeys(ways or ("row", "tiles"), kernel))


@pytest.mark.parametrize(
    ("M", "N", "K", "grid"),
    [
        (16, 64, 4096, (1, 1, 8)),  # 16 blocks of columns, of which a program takes two or more
        (16, 64, 256, (1, 1, 1)),
        (16, 64 * 64, 4096, (1, 64, 4)),
        (16, 64 * 256, 4096, (1, 256, 1)),
    ],
)
def test_columns_are_divided_only_until_there_are_enough_programs(
    M: int, N: int, K: int, grid: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            launched.append(grid)

            def launch(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, sums: Tensor, *_: int, **__: int):
                sums.fill_(1.0)

            return launch

    class Adder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(sums: Tensor, bias: Tensor, out: Tensor, *_: int, **__: int) -> None:
                out.copy_(sums.sum(0) + bias)

            return launch

    kernels = SimpleNamespace(multiply_tiles=Kernel(), add_sections=Adder())
    monkeypatch.setattr(triton_launch, "kernels", lambda module: kernels)
    tensors = {"qdata": torch.zeros(1, K, dtype=torch.int8).expand(N, K), "scale": torch.ones(N, 1)}
    tile = next(rule.tile for rule in gpu_tables.rules_for((9, 0), 8, False, M, N) if rule.way == "tiles")
    run = triton_launch.multiply_tiles(Stored(tensors, Int8(), K), M, torch.bfloat16, tile)
    out = run(torch.zeros(M, K, dtype=torch.bfloat16), torch.full((N,), 0.5))
    assert launched == [grid]
    parts = grid[-1]
    assert torch.equal(out, torch.full((M, N), parts + (0.5 if parts > 1 else 0.0), dtype=torch.bfloat16))


def product(x: Tensor, tensors: dict[str, Tensor], form: Int8 | Int4, bias: Tensor | None = None) -> Tensor:
    out = cuda.linear(x, tensors, bias, form)
    shape = len(tensors["scale"]), x.shape[-1]
    return multiply_dequantized(x, tensors, form, shape, bias) if out is None else out


def assert_product(result: Tensor, x: Tensor, tensors: dict[str, Tensor], form: Int8 | Int4, bias: Tensor) -> None:
    K = x.shape[-1]
    dense = F.linear(x, form.dequantize_rows(tensors, K, x.dtype), bias)
    exact = F.linear(x.double(), form.dequantize_rows(tensors, K, torch.float64), bias.double())
    assert_close_product(result, dense, exact)


@pytest.mark.covering(2)
@every_form
@every_dtype
@pytest.mark.parametrize("shape", [(96,), (0, 96), (2, 3, 96), (600, 96)], ids=str)
def test_with_and_without_kernels_products_are_right(
    shape: tuple[int, ...], dtype: torch.dtype, form: Int8 | Int4, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = form.quantize(random_weight(80, 96, dtype=dtype))
    x, bias = random_weight(*shape, dtype=dtype, seed=1), random_weight(80, dtype=dtype, seed=2)
    for error in (None, RuntimeError("no compiler")):
        cuda._CHECKED.clear()
        cuda._CHOSEN.clear()
        kernel = FakeKernel(form, error=error)
        use(kernel)
        assert_product(product(x, tensors, form, bias), x, tensors, form, bias)
        assert bool(kernel.rows) == (shape == (96,) or (shape == (2, 3, 96) and dtype != torch.float32))


@every_form
def test_a_kernel_is_checked_once_for_each_tile(form: Int8 | Int4, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel(form)
    use(kernel)
    tensors = form.quantize(random_weight(8, 96, dtype=torch.bfloat16))
    for rows in (1, 1, 5, 16, 40, 300):
        product(random_weight(rows, 96, dtype=torch.bfloat16), tensors, form)
    # Each check multiplies two weights, each twice.
    many = 64 if form == Int8(32) else 128
    assert kernel.rows == [*[1] * 4, 1, 1, *[16] * 4, 5, 16, *[64] * 4, 40, *([many] * 4 if many > 64 else []), 300]


@every_form
@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_few_rows_meet_cuda_c_and_triton_where_it_is_wrong(
    factor: float, form: Int8 | Int4, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_has_driver", lambda index: True)
    few_rows, triton = FakeKernel(form, factor), FakeKernel(form)
    use(few_rows, "few_rows")
    use(triton)
    tensors, bias = form.quantize(random_weight(80, 96).bfloat16()), random_weight(80, seed=2).bfloat16()
    few_rows.rows.clear()
    for rows in (3, 12, 20):
        x = random_weight(rows, 96, seed=1).bfloat16()
        assert_product(product(x, tensors, form, bias), x, tensors, form, bias)
    multiplied = [rows for rows in (3, 12) if rows in few_rows.rows]
    assert multiplied == ([3, 12] if factor == 1 else [])
    assert 20 in triton.rows
    assert (3 in triton.rows) == (factor != 1)
    # x of float32, and codes that a lane cannot load, are left to Triton.
    x = random_weight(1, 96, seed=1)
    product(x, form.quantize(random_weight(80, 96)), form)
    assert 1 not in few_rows.rows
    assert 1 in triton.rows


@pytest.mark.parametrize(
    ("rows", "shape", "capability", "expected"),
    [
        (17, (80, 96), (8, 9), True),
        (16, (80, 96), (8, 9), False),
        (17, (80, 96), (8, 6), False),
        (17, (72, 96), (9, 0), False),
        (17, (80, 88), (9, 0), False),
    ],
)
def test_float8_activations_meet_float8_where_a_gpu_multiplies_it(
    rows: int, shape: tuple[int, int], capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_has_driver", lambda index: True)
    monkeypatch.setattr(cuda, "capability", lambda index: capability)
    form, kernel = Float8E4M3(activations="float8"), FakeKernel(Float8E4M3())
    use(kernel, "float8", "few_rows")
    tensors, x = form.quantize(random_weight(*shape).bfloat16()), random_weight(rows, shape[1], seed=1).bfloat16()
    cuda.linear(x, tensors, None, form)
    assert (17 in kernel.rows) == expected


def test_float8_of_pytorch_is_scaled_by_rows_and_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    form, tensors = Float8E4M3(activations="float8"), Float8E4M3().quantize(random_weight(32, 64).bfloat16())
    x, bias = random_weight(2, 20, 64, seed=1).bfloat16(), random_weight(32, seed=2).bfloat16()

    def round_rows(
        x: Tensor, codes: Tensor, row_factors: Tensor, K: int, smallest: float, largest: int, **_: int
    ) -> None:
        rows = x.view(-1, K).float()
        row_factors.copy_(rows.abs().amax(-1, keepdim=True) / largest)
        codes.copy_((rows / row_factors).to(torch.float8_e4m3fn))

    kernels = SimpleNamespace(round_rows={(40,): round_rows})
    monkeypatch.setattr(triton_launch, "kernels", lambda module: kernels)
    result = triton_launch.multiply_float8(Stored(tensors, form, 64), 40, torch.bfloat16, {})(x, bias)
    rounded = stored.round_to_float8(x.float()).double()
    exact = F.linear(rounded, form.dequantize_rows(tensors, 64, torch.float64), bias.double())
    assert result.dtype == torch.bfloat16
    assert result.shape == (2, 20, 32)
    assert (result.double() - exact).norm() <= torch.finfo(torch.bfloat16).eps * exact.norm()


@every_form
@pytest.mark.parametrize(
    ("factor", "error", "reason"),
    [
        (1.1, None, "`row` for .* results differ by 0.2 of"),
        (torch.nan, None, "`row` for .* results differ by nan of"),
        (1.0, RuntimeError("out of resources"), "RuntimeError: out of resources"),
    ],
)
def test_a_kernel_that_fails_its_check_is_never_used(
    form: Int8 | Int4,
    factor: float,
    error: Exception | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernel = FakeKernel(form, factor, error)
    use(kernel)
    cuda._MAKE["dequantize"] = dequantize
    tensors, x = form.quantize(random_weight(8, 96)), random_weight(1, 96, seed=1)
    with caplog.at_level(logging.WARNING):
        first, second = product(x, tensors, form), product(x, tensors, form)
    assert torch.equal(first, second)
    assert_product(first, x, tensors, form, torch.zeros(8))
    assert len(kernel.rows) == (1 if error else 4)
    assert [bool(re.search(reason, record.message)) for record in caplog.records] == [True]


@every_form
def test_nothing_is_checked_while_a_graph_is_captured(form: Int8 | Int4, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel(form)
    use(kernel)
    tensors, x = form.quantize(random_weight(8, 96)), random_weight(1, 96)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        product(x, tensors, form)
        assert kernel.rows == []
        rule = next(rule for rule in cuda._rules(Stored(tensors, form, 96), 1) if rule.way == "row")
        cuda._CHECKED[cuda._case(rule, Stored(tensors, form, 96), x.dtype)] = True
        product(x, tensors, form)
    assert kernel.rows == [1]


@pytest.mark.parametrize(("N", "K"), [(0, 96), (80, 0), (0, 0)])
def test_products_without_a_weight_are_the_bias(N: int, K: int) -> None:
    tensors, bias = Int8().quantize(torch.empty(N, K)), random_weight(N)
    assert torch.equal(product(torch.empty(2, 3, K), tensors, Int8(), bias), bias.expand(2, 3, N))


@pytest.mark.parametrize(
    ("rows", "shape", "expected"),
    [(20, (80, 96), True), (16, (80, 96), False), (20, (79, 96), False), (20, (80, 95), False)],
)
def test_int8_activations_meet_integers_where_there_is_a_product_of_them(
    rows: int, shape: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = Int8(activations="int8")
    integers = FakeKernel(Int8())
    use(FakeKernel(Int8()))
    use(integers, "integers")
    tensors = Int8().quantize(random_weight(*shape).half())
    x, bias = random_weight(rows, shape[1], seed=1).half(), random_weight(shape[0], seed=2).half()
    assert_product(product(x, tensors, form, bias), x, tensors, Int8(), bias)
    assert integers.rows == ([*[17] * 4, 20] if expected else [])


@pytest.mark.parametrize(("group_size", "expected"), [(None, True), (8, True), (128, True), (4, False), (96, False)])
def test_groups_are_served_where_blocks_hold_whole_ones(
    group_size: int | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeTensorMode():
        tensors = {"qdata": torch.empty(8, 8, device="cuda"), "scale": torch.empty(8, 1, device="cuda")}
        assert cuda.serves(Int8(group_size), tensors, torch.float32) == expected


@pytest.mark.parametrize(
    ("dtype", "scale_dtype"), [(torch.float64, torch.float32), (torch.bfloat16, torch.float32)], ids=str
)
def test_nothing_is_prepared_in_a_dtype_that_no_kernel_has(
    dtype: torch.dtype, scale_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeTensorMode():
        held = {"qdata": torch.empty(8, 8, dtype=torch.int8, device="cuda")}
        held["scale"] = torch.empty(8, 1, dtype=scale_dtype, device="cuda")
        assert prepare_few_rows(held, Int8(), dtype) is None


@pytest.mark.parametrize(("x_on", "weight_on", "expected"), [("cuda", "cuda", True), ("cuda", "cpu", False)])
def test_a_product_is_served_where_both_factors_are_on_one_gpu(
    x_on: str, weight_on: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeTensorMode():
        held = {"qdata": torch.empty(8, 8, dtype=torch.int8, device=weight_on)}
        held["scale"] = torch.empty(8, 1, device=weight_on)
        assert (linear(torch.empty(2, 8, device=x_on), held, Int8()) is not None) == expected


@pytest.mark.parametrize("shape", [(96,), (1, 1, 96), (2, 3, 96), (70, 96), (300, 96)], ids=str)
@every_form
def test_what_is_prepared_multiplies_as_others_do_once_its_kernel_is_right(
    form: Int8 | Int4, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(FakeKernel(form))
    cuda._MAKE["dequantize"] = dequantize
    tensors, bias = form.quantize(random_weight(80, 96).half()), random_weight(80, seed=2).half()
    multiply = cuda.prepare(tensors, form, 96, torch.float16)
    x = random_weight(*shape, seed=1).half()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert multiply(x, bias) is None
    for _ in range(3):
        result = multiply(x, bias)
        assert result is not None
        assert torch.equal(result, product(x, tensors, form, bias))


def dequantize(weight: Stored, M: int, dtype: torch.dtype, tile: Mapping[str, int]) -> Callable[[], Tensor]:
    return lambda: weight.form.dequantize_rows(weight.tensors, weight.K, dtype)


def test_what_is_prepared_is_found_once_for_a_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    form = Int8(activations="int8")
    use(FakeKernel(Int8()))
    use(FakeKernel(Int8()), "integers")
    choose, found = cuda._choose, []
    monkeypatch.setattr(cuda, "_choose", lambda *arguments: found.append(arguments[-1]) or choose(*arguments))
    tensors = form.quantize(random_weight(80, 96).half())
    multiply = cuda.prepare(tensors, form, 96, torch.float16)
    for rows in (1, 5, 1, 5, 17, 40, 300, 16):
        multiply(random_weight(rows, 96).half(), None)
    assert found == [1, 5, 17, 40, 300, 16]


def test_rows_are_left_to_others_where_their_kernel_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    use(FakeKernel(Int8(), 1.1))
    tensors = Int8().quantize(random_weight(80, 96))
    multiply = cuda.prepare(tensors, Int8(), 96, torch.float32)
    assert multiply(random_weight(96), None) is None


def test_nothing_is_served_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not cuda.has_triton.__wrapped__(0)
    assert not cuda._has_driver.__wrapped__(0)


@pytest.mark.parametrize("form", [Int8(), Int8(32), Int8(activations="int8"), Int4(32)], ids=str)
def test_a_compiler_sees_one_op(form: Int8 | Int4, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = form.quantize(random_weight(80, 96))

    def multiply(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor) -> Tensor | None:
        return linear(x, {"qdata": qdata, "scale": scale}, form, bias)

    with FakeTensorMode():
        on_gpu = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda") for tensor in tensors.values()]
        x, bias = torch.empty(2, 3, 96, device="cuda"), torch.empty(80, device="cuda")
        graph = make_fx(multiply)(x, *on_gpu, bias)
        result = graph(x, *on_gpu, bias)
    calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert calls == [stored.LINEAR]
    assert (result.shape, result.dtype, result.device.type) == ((2, 3, 80), torch.float32, "cuda")


def test_a_slower_kernel_of_a_captured_graph_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    form, kernel = Int8(), FakeKernel(Int8())
    use(kernel)
    cuda._MAKE["dequantize"] = dequantize
    tensors, x = form.quantize(random_weight(80, 96)), random_weight(1, 96, seed=1)
    product(random_weight(5, 96), tensors, form)  # checks what dequantizes
    multiply = cuda.prepare(tensors, form, 96, torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert multiply(x, None) is not None
    assert 1 not in kernel.rows
    multiply(x, None)
    assert 1 in kernel.rows


def test_an_op_chooses_once_for_products_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    use(FakeKernel(Int8()))
    choose, chosen = cuda._choose, []
    monkeypatch.setattr(cuda, "_choose", lambda *arguments: chosen.append(arguments[-1]) or choose(*arguments))
    first, second = (Int8().quantize(random_weight(80, 96, seed=seed).half()) for seed in (0, 1))
    memory = torch.empty(80 * 96 + 8, dtype=torch.int8)
    shifted = first | {"qdata": memory[8:].view(80, 96).copy_(first["qdata"])}
    for tensors, rows in ((first, 1), (second, 1), (first, 1), (first, 2), (shifted, 1)):
        x = random_weight(rows, 96, seed=2).half()
        assert_product(product(x, tensors, Int8()), x, tensors, Int8(), torch.zeros(80).half())
    assert chosen[:2] == [1, 2]
    assert len(chosen) <= 3
