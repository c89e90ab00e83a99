"""Compiled products: as exact as dequantizing, on every number of rows and threads, from any memory."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from weights import random_weight

from hf_trainweights import QuantizedTensor
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.codebook4 import Codebook4
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.uint import UInt4
from hf_trainweights.kernels import arguments, compiled, linear, prepare_few_rows, stored
from hf_trainweights.kernels.arguments import MultiplyFew
from hf_trainweights.testing.values import assert_close_product, assert_close_products

on_every_cpu = pytest.mark.usefixtures("cpu")
every_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)

FORMATS = [Int8(), Int8(4), Int8(16), Int8(32), Int8(128), Int4(32), Int4(64), Int4(128), Codebook4(), Float8E4M3()]
# On both sides of every threshold, of a vector of tokens and of a tile of three, and more than one panel of digits.
ROWS = (1, 2, 3, 4, 5, 7, 11, 16, 17, 33, 49, 700)


def product(x: Tensor, tensors: dict[str, Tensor], form: Format, bias: Tensor | None = None) -> Tensor:
    """Return the product as a weight computes it without a gradient, the compiled functions alone."""
    out = prepared(tensors, form, x.dtype)(x, bias)
    if out is None:
        out = linear(x, tensors, form, bias)
    assert out is not None
    return out


def prepared(tensors: dict[str, Tensor], form: Format, dtype: torch.dtype) -> MultiplyFew:
    multiply = prepare_few_rows(tensors, form, dtype)
    assert multiply is not None
    return multiply


@pytest.mark.slow
@pytest.mark.covering(2)
@on_every_cpu
@every_dtype
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_every_number_of_rows_is_as_exact_on_every_cpu(form: Format, dtype: torch.dtype) -> None:
    form = form.fallback((50, 128))
    tensors = form.quantize(random_weight(50, 128, dtype=dtype))
    weight = form.dequantize(tensors, (50, 128), torch.float32)
    assert_close_products(lambda x, bias: product(x, tensors, form, bias), weight, dtype, (1, 17, 65, 129, 257))


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.usefixtures("library")
@every_dtype
@pytest.mark.parametrize("form", [Int8(), Int4(32), UInt4(16), Float8E4M3()], ids=str)
def test_the_longest_rows_are_multiplied_with_more_tokens_than_are_held(form: Format, dtype: torch.dtype) -> None:
    N, K = 5, 1 << 16
    form = form.fallback((N, K))
    tensors = form.quantize(random_weight(N, K, dtype=dtype))
    weight = form.dequantize(tensors, (N, K), torch.float32)
    assert_close_products(lambda x, bias: product(x, tensors, form, bias), weight, dtype, (40,))


@pytest.mark.slow
@pytest.mark.covering(2)
@on_every_cpu
@pytest.mark.parametrize("K", [1, 3, 70, 130])
@pytest.mark.parametrize("form", [Int8(), Int8(activations="int8"), Float8E4M3()], ids=str)
def test_columns_that_fill_no_vector_are_multiplied_and_nothing_behind_them(form: Format, K: int) -> None:
    N = 20
    tensors = form.quantize(random_weight(N, K))
    weight = form.dequantize(tensors, (N, K), torch.float64)
    # What lies before and behind the codes and x would show in the product.
    surrounded = torch.full((N * K + 256,), 99).to(tensors["qdata"].dtype)[77 : 77 + N * K].view(N, K)
    tensors["qdata"] = surrounded.copy_(tensors["qdata"])
    for M in ROWS:
        x = torch.full((M * K + 256,), math.nan)[3 : 3 + M * K].view(M, K).copy_(random_weight(M, K, seed=M))
        limit = 2e-2 if "activations" in form.get_config() else 1e-6
        error = product(x, tensors, form).double() - x.double() @ weight.t()
        assert error.norm() <= limit * x.double().norm() * weight.norm()


@pytest.mark.slow
@pytest.mark.covering(2)
@on_every_cpu
@every_dtype
def test_8_bit_activations_are_rounded_to_127_steps_of_each_row(dtype: torch.dtype, threads: int) -> None:
    form, N, K = Int8(activations="int8"), 40, 200
    tensors = form.quantize(random_weight(N, K, dtype=dtype))
    weight = form.dequantize(tensors, (N, K), torch.float64)
    for M in ROWS:
        x = random_weight(M, K, dtype=dtype, seed=M)
        worth = x.double().abs().amax(1, keepdim=True) / 127
        expected = ((x.double() / worth).round() * worth) @ weight.t()
        # A number in the middle between two steps may fall to either of them. The rounding itself is 7e-3 of the norm.
        error = (product(x, tensors, form).double() - expected).norm() / expected.norm()
        assert error <= 1e-3 + torch.finfo(dtype).eps


@pytest.mark.slow
@pytest.mark.covering(1)
@on_every_cpu
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_threads_change_no_bit(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_THREADED", 0)
    tensors, before = form.quantize(random_weight(100, 256)), torch.get_num_threads()
    # PyTorch, which multiplies more rows than the functions serve, promises no such thing.
    found = compiled.find(compiled.in_memory(form), 100, 256, torch.float32, torch.float32)
    assert found is not None
    for M in (M for M in ROWS if found.most_rows >= M):
        x, results = random_weight(M, 256, seed=M), []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(product(x, tensors, form))
        torch.set_num_threads(before)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


@pytest.mark.covering(2)
@on_every_cpu
@every_dtype
@pytest.mark.parametrize("form", [Int8(), Int8(activations="int8"), Int8(32), Int4(32)], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_finite_magnitude_becomes_nan_and_no_other(
    form: Format, value: float, dtype: torch.dtype
) -> None:
    tensors = form.quantize(random_weight(20, 64, dtype=dtype))
    # By every way that serves the weight somewhere: from 257 rows on none is compiled with AMX and in bfloat16.
    for M in (2, 4, 16, 65, 260):
        x = random_weight(M, 64, dtype=dtype)
        x[1, 3] = value
        rows = product(x, tensors, form).isnan().float().mean(1)
        assert rows.tolist() == [float(m == 1) for m in range(M)]


@pytest.mark.covering(2)
@on_every_cpu
@pytest.mark.parametrize("top", [0.0, 1e-44, 1e-38, 1e32, 3e38])
@pytest.mark.parametrize("form", [Int8(), Int8(activations="int8"), Int4(32), Float8E4M3()], ids=str)
def test_the_smallest_and_the_largest_rows_are_multiplied(form: Format, top: float) -> None:
    if isinstance(form, Float8E4M3) and top > 1e33:
        pytest.skip("sums with float8 codes are scaled when they are complete, and overflow there")
    # Weights small enough for the sums of the largest rows.
    tensors = form.quantize(random_weight(20, 64) * 1e-3)
    for M in (1, 4, 16):
        x = random_weight(M, 64).clamp_(-1, 1) * top
        exact = x.double() @ form.dequantize(tensors, (20, 64), torch.float64).t()
        # One digit counts steps of 1e-33 at least.
        torch.testing.assert_close(product(x, tensors, form).double(), exact, rtol=0.1, atol=max(1e-33, 0.01 * top))


@pytest.mark.usefixtures("library")
def test_guards_check_what_a_function_gets_where_they_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    monkeypatch.setattr(arguments, "check_product", lambda op, *_: checked.append(op))
    for enabled in (False, True):
        for module in (arguments, stored):
            monkeypatch.setattr(module, "DEBUG", enabled)
        few = prepared(Int8().quantize(random_weight(64, 64)), Int8(), torch.float32)
        few(torch.ones(1, 64), None)
        assert checked == ["a prepared product"] * enabled


@on_every_cpu
def test_what_the_functions_do_not_take_is_left_to_other_ways() -> None:
    form = Int8()
    tensors = form.quantize(random_weight(20, 64))
    multiply, x = prepared(tensors, form, torch.float32), torch.randn(6, 64)
    assert multiply(x.t().contiguous().t(), None) is None
    assert multiply(x, torch.ones(20, dtype=torch.float64)) is None
    assert multiply(x.to("meta"), None) is None
    assert multiply(x, torch.ones(20)) is not None


@on_every_cpu
@pytest.mark.parametrize(("K", "group_size"), [(48, 24), (96, 48), (66_000, None)])
def test_shapes_that_the_functions_do_not_serve_are_multiplied_in_another_way(K: int, group_size: int | None) -> None:
    form = Int8(group_size)
    assert compiled.find(form, 3, K, torch.float32, torch.float32) is None
    layer = nn.Linear(K, 3)
    layer.weight = nn.Parameter(QuantizedTensor.quantize(layer.weight.detach(), form), requires_grad=False)
    x = torch.randn(5, K)
    with torch.no_grad():
        exact = F.linear(x.double(), layer.weight.dequantize(torch.float64), layer.bias.double())
        torch.testing.assert_close(layer(x).double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("without_compiled")
@every_dtype
@pytest.mark.parametrize("form", [Int8(32), Float8E4M3()], ids=str)
def test_a_program_from_elsewhere_runs_without_the_library(form: Format, dtype: torch.dtype) -> None:
    tensors, bias = form.quantize(random_weight(20, 64, dtype=dtype)), torch.randn(20).to(dtype)
    weight = form.dequantize(tensors, (20, 64), dtype)
    for M in (1, 9):
        x = random_weight(M, 64, dtype=dtype, seed=M)
        out = stored.LINEAR(x, list(tensors.values()), bias, stored.config_of(form))
        assert_close_product(out, F.linear(x, weight, bias), F.linear(x.double(), weight.double(), bias.double()))


@pytest.mark.parametrize(
    ("missing", "chosen"),
    [
        ((), "amx"),
        (("amx_int8",), "avx512_bf16"),
        (("avx512_bf16",), "avx512_bf16"),
        (("avx512_bf16", "fast_avx512_bf16"), "avx512"),
        (("avx512_vnni",), "avx_vnni"),
        (("avx512_bw",), "avx_vnni"),
        (("avx512_vnni", "avx_vnni"), "avx2"),
        (("avx512_vnni", "fma3"), "neon"),
        (("avx512_vnni", "fma3", "dot"), None),
    ],
    ids=str,
)
def test_a_cpu_takes_the_library_whose_instructions_it_has(
    missing: tuple[str, ...], chosen: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = {name for needed in compiled._LIBRARIES.values() for name in needed}
    monkeypatch.setattr(compiled, "capabilities", lambda: dict.fromkeys(names, True) | dict.fromkeys(missing, False))
    monkeypatch.setattr(compiled, "_NATIVE", tmp_path)
    monkeypatch.setattr(compiled, "_open", lambda _: object())
    monkeypatch.setattr(compiled, "instructions", compiled.instructions.__wrapped__)
    for name in compiled._LIBRARIES:
        (tmp_path / f"{name}.so").touch()
    assert compiled.instructions() == chosen
    if chosen is None:
        assert compiled.loaded_library.__wrapped__() is None


def test_a_library_that_a_compiler_could_not_make_leaves_its_cpus_to_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = {name for needed in compiled._LIBRARIES.values() for name in needed}
    monkeypatch.setattr(compiled, "capabilities", lambda: dict.fromkeys(names, True))
    monkeypatch.setattr(compiled, "_NATIVE", tmp_path)
    monkeypatch.setattr(compiled, "_open", lambda _: object())
    monkeypatch.setattr(compiled, "instructions", compiled.instructions.__wrapped__)
    assert compiled.instructions() is None
    for name in reversed(compiled._LIBRARIES):
        (tmp_path / f"{name}.so").touch()
        assert compiled.instructions() == name


def test_an_installation_without_the_library_does_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled, "instructions", lambda: "avx512")
    monkeypatch.setattr(compiled, "_NATIVE", tmp_path)
    monkeypatch.setattr(compiled, "_open", compiled._open.__wrapped__)
    assert compiled.loaded_library.__wrapped__() is None
    (tmp_path / "avx512.so").write_bytes(b"no library")
    assert compiled.loaded_library.__wrapped__() is None
