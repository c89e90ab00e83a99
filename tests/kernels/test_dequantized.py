"""Rows of a weight that the compiled functions dequantize are those of the format, and products with them are exact."""

from __future__ import annotations

import pytest
import torch
from cpus import HASWELL, use_cpu
from weights import random_weight, same_bytes

from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.codebook4 import Codebook4
from hf_trainweights.formats.coded import Coded
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.uint import UInt2, UInt3, UInt4, UInt5, UInt6
from hf_trainweights.kernels import compiled, stored
from hf_trainweights.testing.values import assert_close_product

FORMATS = [
    *(Int8(size) for size in (None, 4, 8, 16, 32, 64, 128)),
    *(Int4(size) for size in (32, 64, 128)),
    *(form(size) for form in (UInt2, UInt3, UInt4, UInt5, UInt6) for size in (16, 32)),
    *(Codebook4(), Float8E4M3(), Coded()),
]


@pytest.mark.slow
@pytest.mark.covering(2)
@pytest.mark.usefixtures("library", "threads")
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("K", [96, 128, 576])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_rows_are_those_of_the_format(form: Format, K: int, dtype: torch.dtype) -> None:
    N = 21
    form = form.fallback((N, K))
    for scale_dtype in FLOAT_DTYPES:  # no parameter: these would be four thousand cases more, and each costs time
        tensors = form.quantize(random_weight(N, K, dtype=scale_dtype))
        product = compiled.find(compiled.in_memory(form), N, K, dtype, scale_dtype)
        assert product is not None
        qdata, scale, *groups = (tensors[name] for name in form.tensor_names)
        expected = form.dequantize(tensors, (N, K), dtype)
        for rows in (slice(0, N), slice(0, 1), slice(8, 16), slice(16, 32)):
            assert same_bytes(product.dequantize(qdata, scale, tuple(groups), rows).clone(), expected[rows])


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("K", [1, 3, 70, 130])
@pytest.mark.parametrize("form", [Int8(), Float8E4M3()], ids=str)
def test_columns_that_fill_no_vector_are_written_and_nothing_behind_them(form: Format, K: int) -> None:
    tensors = form.quantize(random_weight(5, K))
    product = compiled.find(form, 5, K, torch.bfloat16, torch.float32)
    assert product is not None
    # The scratch memory keeps what lay behind the rows.
    product.dequantize(tensors["qdata"], tensors["scale"], (), slice(0, 5)).fill_(7)
    rows = product.dequantize(tensors["qdata"], tensors["scale"], (), slice(0, 2))
    behind = torch.as_strided(rows, (3 * K,), (1,), 2 * K)
    assert same_bytes(rows.clone(), form.dequantize(tensors, (5, K), torch.bfloat16)[:2])
    assert behind.eq(7).all()


@pytest.mark.slow
@pytest.mark.covering(2)
@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("form", [Int8(), Int8(32), Int4(128), UInt4(16), Codebook4(), Float8E4M3()], ids=str)
def test_products_with_the_weight_itself_are_as_exact_as_dequantizing(
    form: Format, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    N, K = 300, 128
    monkeypatch.setattr(stored, "_BLOCK_ELEMENTS", 1 << 10)  # so that a sum is made of two blocks
    tensors = form.quantize(random_weight(N, K, dtype=dtype))
    weight = form.dequantize(tensors, (N, K), torch.float32)
    for M in (0, 1, 5, 130):
        x = random_weight(M, N, dtype=dtype)
        out = stored.multiply_transpose(x, tensors, form, (N, K))
        assert_close_product(out, (x.float() @ weight).to(dtype), x.double() @ weight.double())


def test_x_that_is_no_float_of_the_cpu_has_no_op() -> None:
    tensors = Int4(32).quantize(random_weight(64, 32))
    for x in (random_weight(2, 32).double(), random_weight(2, 32).to("meta")):
        assert stored.linear(x, tensors, Int4(32)) is None


@pytest.mark.parametrize("rows", [1, 5])
def test_a_large_weight_is_dequantized_block_by_block(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_BLOCK_ELEMENTS", 1 << 10)
    taken: list[slice] = []
    monkeypatch.setattr(stored, "_rows_of", lambda *_: lambda part: taken.append(part) or random_weight(300, 128)[part])
    stored.multiply_transpose(random_weight(rows, 300), {}, Int8(), (300, 128))
    stored.multiply_dequantized(random_weight(rows, 128), {}, Int8(), (300, 128), None)
    assert taken == [slice(0, 256), slice(256, 512)] * 2


@pytest.mark.parametrize("rows", [1, 5])
def test_a_product_with_the_weight_itself_takes_the_dtype_that_the_cpu_multiplies_fast(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cpu(HASWELL, monkeypatch)
    taken, rows_of = [], stored._rows_of
    monkeypatch.setattr(stored, "_rows_of", lambda *arguments: taken.append(arguments[-1]) or rows_of(*arguments))
    tensors = Int8().quantize(random_weight(20, 64).bfloat16())
    stored.multiply_transpose(random_weight(rows, 20).bfloat16(), tensors, Int8(), (20, 64))
    assert taken == [torch.float32]
