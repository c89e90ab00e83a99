"""The Triton kernels on CPU tensors, by Triton's interpreter; `test_triton_products` runs this file in its own process.

The interpreter keeps bfloat16 as the bits of an integer: `tl.dot` multiplies these bits, and what is stored is cut off
instead of rounded. So of bfloat16 only the kernel for one row, which may miss by a unit in the last place, and the
unpacking of codes are run. The interpreter knows no instructions of GPUs; what the kernels name is imitated here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from covering import exhaustive
from forbidden_page import before_a_forbidden_page
from torch import Tensor
from triton.runtime import interpreter
from weights import random_weight

from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.kernels import cuda, gpu_tables, triton_launch
from hf_trainweights.kernels.triton_products import multiply_codes, round_rows, unpack_pair
from hf_trainweights.testing.values import assert_close_product, round_once

PAIRS = {"f16x2": torch.float16, "bf16x2": torch.bfloat16}


def run_instruction(builder: Any, text: str, registers: str, values: list[Any], *_: Any) -> SimpleNamespace:
    """Return what an instruction gives of three registers."""
    first, second, third = (each.astype(np.int32) for each in np.broadcast_arrays(*(value.data for value in values)))
    if text == "lop3.b32 $0, $1, $2, $3, 0xEA;":
        result = first & second | third
    else:
        name, _, registers = text.partition(" ")
        assert registers == "$0, $1, $2, $3;"
        dtype = PAIRS[name.removeprefix("fma.rn.")]
        factors = [torch.from_numpy(each.copy()).view(dtype).double() for each in (first, second, third)]
        result = round_once(factors[0] * factors[1] + factors[2], dtype).view(torch.int32).numpy()
    return SimpleNamespace(get_result=lambda index: interpreter.TensorHandle(result, tl.int32))


interpreter.InterpreterBuilder.create_inline_asm = run_instruction

# N and K within one block, of several blocks with a rest, and in several parts of K with a shorter last one.
CASES = [
    (Int8(), 7, 36),
    (Int8(64), 70, 1088),
    (Int4(32), 9, 96),
    (Int4(64), 33, 2304),
    *exhaustive(
        (Int8(), 1, 4),
        (Int8(), 130, 260),
        (Int8(), 80, 2304),
        (Int8(16), 9, 48),
        (Int8(256), 66, 512),
        (Int4(32), 70, 1056),
        (Int4(128), 129, 256),
        (Int4(128), 5, 128),
    ),
]
every_case = pytest.mark.parametrize(("form", "N", "K"), CASES, ids=str)


def tile_of(way: str, M: int, bits: int = 8) -> dict[str, int]:
    rules = gpu_tables.rules_for((0, 0), bits, False, M, 1)
    return dict(next(rule.tile for rule in rules if rule.way == way))


def made(way: str, tensors: dict[str, Tensor], K: int, M: int, dtype: torch.dtype) -> Any:
    tile = tile_of(way, M, 4 if tensors["qdata"].dtype == torch.int32 else 8)
    return cuda._MAKE[way](triton_launch.Stored(tensors, Int8(), K), M, dtype, tile)


def multiply(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    tensors = {"qdata": qdata, "scale": scale}
    return made("row" if len(x) == 1 else "tiles", tensors, x.shape[1], len(x), x.dtype)(x, bias)


def assert_product(x: Tensor, tensors: dict[str, Tensor], form: Int8 | Int4, bias: Tensor | None = None) -> None:
    result = multiply(x, tensors["qdata"], tensors["scale"], bias)
    exact = F.linear(
        x.double(),
        form.dequantize_rows(tensors, x.shape[1], torch.float64),
        None if bias is None else bias.double(),
    )
    assert result.is_contiguous()
    if x.dtype == torch.bfloat16:
        assert (result.double() - exact).norm() <= torch.finfo(x.dtype).eps * exact.norm()
    else:
        dense = F.linear(x, form.dequantize_rows(tensors, x.shape[1], x.dtype), bias)
        assert_close_product(result, dense, exact)


@pytest.mark.covering(1)
@every_case
@pytest.mark.parametrize(
    ("M", "dtype"),
    [
        (1, torch.float32),
        (3, torch.float16),
        (17, torch.float16),
        *exhaustive(*((M, torch.float16) for M in (1, 16, 33, 130))),
    ],
    ids=str,
)
def test_every_shape_keeps_the_bound(M: int, dtype: torch.dtype, form: Int8 | Int4, N: int, K: int) -> None:
    tensors = form.quantize(random_weight(N, K, dtype=dtype))
    bias = random_weight(N, dtype=dtype, seed=2) if M % 2 else None
    assert_product(random_weight(M, K, dtype=dtype, seed=1), tensors, form, bias)


@triton.jit
def unpack(words, scales, out, J: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, dtype: tl.constexpr):
    place = tl.arange(0, 64)
    tl.store(out + place, unpack_pair(tl.load(words + place), tl.load(scales + place), J, BITS, GROUP, dtype))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", PAIRS.values(), ids=str)
def test_every_code_is_unpacked_exactly_and_scaled_once(dtype: torch.dtype, bits: int, grouped: bool) -> None:
    # Each byte meets each place of a word.
    words = (torch.arange(64)[:, None] * 4 + torch.arange(4) * 77).to(torch.uint8).view(torch.int32).flatten()
    scale, count = random_weight(64, dtype=dtype), 32 // bits
    pairs = torch.stack([scale, scale], 1).view(torch.int32).flatten()
    codes = (words[:, None] >> (bits * torch.arange(count))) & ((1 << bits) - 1)
    codes = codes - 8 if bits == 4 else (codes ^ 128) - 128
    expected = codes.double() * (scale.double()[:, None] if grouped else 1)
    for j in range(count // 2):
        out = torch.empty(64, dtype=torch.int32)
        unpack[(1,)](words, pairs, out, j, bits, grouped, tl.bfloat16 if dtype == torch.bfloat16 else tl.float16)
        assert torch.equal(out.view(dtype).view(64, 2), round_once(expected[:, [j, j + count // 2]], dtype))


@pytest.mark.covering(1)
@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_weights_are_dequantized_bit_for_bit(dtype: torch.dtype, form: Int8 | Int4, N: int, K: int) -> None:
    for scale_dtype in (torch.float32, torch.float16, torch.bfloat16):
        tensors = form.quantize(random_weight(N, K, dtype=scale_dtype))
        weight = made("dequantize", tensors, K, 0, dtype)()
        assert torch.equal(weight, form.dequantize_rows(tensors, K, dtype))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_int8_activations_are_rounded_as_on_a_cpu(dtype: torch.dtype) -> None:
    tensors = Int8().quantize(random_weight(80, 96, dtype=dtype))
    x, bias = random_weight(50, 96, dtype=dtype, seed=1), random_weight(80, dtype=dtype, seed=2)
    x[3], x[4, 7], x[5, 8] = 0, torch.inf, torch.nan
    result = made("integers", tensors, 96, 50, dtype)(x, bias)
    top = x.float().abs().amax(-1, keepdim=True).clamp_min(2.0**-119) * (1 / 127)
    rounded = (x.float() / top).round() * top
    expected = F.linear(rounded.double(), Int8().dequantize_rows(tensors, 96, torch.float64), bias.double())
    finite = x.isfinite().all(-1)
    assert (result - expected)[finite].norm() <= torch.finfo(dtype).eps * expected[finite].norm()
    assert result[~finite].isnan().all()
    assert (~finite).sum() == 2


@pytest.mark.parametrize(("M", "N", "K"), [(5, 40, 96), (70, 33, 272), *exhaustive((130, 200, 64), (65, 128, 1000))])
def test_integers_are_scaled_where_they_are_summed(M: int, N: int, K: int) -> None:
    generator = torch.Generator().manual_seed(0)
    codes, qdata = (torch.randint(-128, 128, (rows, K), generator=generator, dtype=torch.int8) for rows in (M, N))
    row_factors, scale, bias = torch.rand(M) / 1000, random_weight(N, 1).half(), random_weight(N, seed=2).half()
    apart = torch.zeros(N, 2 * K, dtype=torch.int8)
    apart[:, :K] = qdata
    out, tile = torch.full((M, N), torch.nan, dtype=torch.float16), tile_of("integers", M)
    programs = -(-M // tile["BLOCK_M"]) * -(-N // tile["BLOCK_N"])
    multiply_codes[(programs,)](codes, row_factors, apart, scale, bias, out, M, N, K, 2 * K, **tile)
    exact = (codes.double() @ qdata.double().t()) * row_factors.double()[:, None] * scale.double().t() + bias.double()
    assert (out.double() - exact).norm() <= torch.finfo(torch.float16).eps * exact.norm()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_rows_are_rounded_to_float8() -> None:
    x = random_weight(20, 96, seed=1).half()
    x[3], x[4, 7] = 0, torch.inf
    codes, row_factors = torch.empty(20, 96, dtype=torch.float8_e4m3fn), torch.empty(20)
    round_rows[(20,)](x, codes, row_factors, 96, 2.0**-119, 448, BLOCK=1024)
    units = x.float().abs().amax(-1).clamp_min(2.0**-119) * (1 / 448)
    finite = x.isfinite().all(-1)
    assert torch.equal(row_factors[finite], units[finite])
    assert row_factors[~finite].isnan().all()
    expected = (x.float() / units[:, None]).to(torch.float8_e4m3fn)
    # The interpreter's own cast to float8 rounds ties differently, and loses a carry into the exponent.
    assert (codes[finite].view(torch.int8) == expected[finite].view(torch.int8)).float().mean() > 0.9


@pytest.mark.exhaustive
@every_case
def test_one_row_of_bfloat16(form: Int8 | Int4, N: int, K: int) -> None:
    tensors = form.quantize(random_weight(N, K, dtype=torch.bfloat16))
    x, bias = random_weight(1, K, seed=1).bfloat16(), random_weight(N, seed=2).bfloat16()
    assert_product(x, tensors, form, bias)


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", [Int8(), Int8(32), Int4(32)], ids=str)
@pytest.mark.parametrize("M", [1, 20])
def test_strides_of_the_weight_do_not_matter(form: Int8 | Int4, M: int) -> None:
    tensors = {name: tensor[::2] for name, tensor in form.quantize(random_weight(160, 96).half()).items()}
    assert_product(random_weight(M, 96, seed=1).half(), tensors, form, random_weight(80, seed=2).half())


@pytest.mark.parametrize("M", [1, 5])
def test_codes_may_begin_at_any_byte(M: int) -> None:
    tensors = Int8().quantize(random_weight(7, 96).half())
    memory = torch.empty(7 * 96 + 1, dtype=torch.int8)
    shifted = {**tensors, "qdata": memory[1:].view(7, 96).copy_(tensors["qdata"])}
    assert_product(random_weight(M, 96, seed=1).half(), shifted, Int8())


@pytest.mark.parametrize("form", [Int8(), Int8(32), Int4(32)], ids=str)
def test_a_scale_of_another_dtype_is_used_as_it_is(form: Int8 | Int4) -> None:
    assert_product(random_weight(1, 96, seed=1), form.quantize(random_weight(80, 96, dtype=torch.bfloat16)), form)


@pytest.mark.covering(1)
@every_case
@pytest.mark.parametrize("M", [1, 17])
def test_nothing_is_touched_past_the_end(
    M: int, form: Int8 | Int4, N: int, K: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_empty = torch.Tensor.new_empty

    def new_empty_before_a_forbidden_page(x: Tensor, *shape: int, **options: Any) -> Tensor:
        out = new_empty(x, *shape, **options)
        return before_a_forbidden_page(out) if out.numel() else out

    tensors = form.quantize(random_weight(N, K).half())
    x, bias = random_weight(M, K, seed=1).half(), random_weight(N, seed=2).half()
    arguments = (x, tensors["qdata"], tensors["scale"], bias)
    expected = multiply(*arguments)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty_before_a_forbidden_page)
    assert torch.equal(multiply(*map(before_a_forbidden_page, arguments)), expected)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.covering(1)
@pytest.mark.parametrize("form", [Int8(), Int8(32), Int4(32)], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_row(form: Int8 | Int4, value: float) -> None:
    tensors, x = form.quantize(random_weight(80, 96).half()), random_weight(20, 96, seed=1).half()
    expected = multiply(x, tensors["qdata"], tensors["scale"], None)
    x[3, 5] = value
    result = multiply(x, tensors["qdata"], tensors["scale"], None)
    assert not result[3].isfinite().any()
    assert torch.equal(result[:3], expected[:3])
    assert torch.equal(result[4:], expected[4:])


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", [Int8(), Int8(64), Int4(32)], ids=str)
@pytest.mark.parametrize(
    ("M", "dtype"), [(1, torch.float32), (1, torch.float16), (16, torch.float16), (64, torch.float16)], ids=str
)
def test_the_check_before_the_first_use_passes(M: int, dtype: torch.dtype, form: Int8 | Int4) -> None:
    for way, rows in (("row" if M == 1 else "tiles", M), ("dequantize", 0), ("integers", 17)):
        if way != "integers" or form == Int8():
            tile = tuple(sorted(tile_of(way, rows, 4 if isinstance(form, Int4) else 8).items()))
            assert cuda._check(cuda.Case(way, tile, rows, 0, dtype, dtype, torch.device("cpu"), form))
