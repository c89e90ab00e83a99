"""Weights of other programs: their rows have each bit of the format's, and products are as exact as with these."""

from __future__ import annotations

import pytest
import torch
from fences import product
from torch import Tensor
from weights import random_weight, same_bytes, stored_tensors

from hf_trainweights import QuantizedTensor
from hf_trainweights.formats.affine import BITS, OFFSETS, ROUNDINGS, Affine
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.table4 import Table4
from hf_trainweights.kernels import compiled

K_QUANTS = [Affine(bits, 32 if code == "k4" else 16, code, "none") for bits, code in
            ((4, "k4"), (5, "k4"), (2, "k2"), (3, "k3"), (6, "k6"))]  # fmt: skip
FORMATS: list[Format] = [
    *K_QUANTS,
    *(Affine(bits, 32, "plain", "bias") for bits in BITS),
    *(Affine(bits, 64) for bits in BITS),
    *(Affine(4, size) for size in (8, 16, 32, 48, 96, 128, 256, None)),
    *(Affine(5, None, offset="none"), Affine(8, None)),
    *(Table4(32, scales) for scales in ("plain", "e8m0", "nested", "iq4_xs")),
    *(Table4(16, scales) for scales in ("e4m3", "e4m3_divided")),
    *(Table4(64, "nested"), Table4(96)),
    *(Float8E4M3(32, "e8m0"), Float8E4M3(128), Float8E4M3(None, "e8m0"), Float8E4M3(24)),
]
ROUNDED = [Affine(4, 64, "plain", offset, rounding) for offset in OFFSETS for rounding in ROUNDINGS]
# One to four tokens have a way of their own, and panels and PyTorch serve many.
ROWS = (1, 2, 3, 4, 5, 64)

every_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)


def columns_of(form: Format, superblocks: int) -> int:
    """Return a number of columns that a format divides, about 256 for each superblock, odd if that is possible."""
    K = -(-256 * superblocks // form.column_step) * form.column_step
    return K + 5 if form.column_step == 1 else K


def rows_of(form: Format, tensors: dict[str, Tensor], N: int, K: int, dtype: torch.dtype) -> Tensor:
    """Return the rows that the library dequantizes."""
    product = compiled.find(form, N, K, dtype, tensors["scale"].dtype)
    assert product is not None
    qdata, scale, *others = (tensors[name] for name in form.tensor_names)
    return product.dequantize(qdata, scale, tuple(others), slice(0, N)).clone()


@pytest.mark.slow
@pytest.mark.covering(2)
@pytest.mark.usefixtures("library", "threads")
@every_dtype
@pytest.mark.parametrize("superblocks", [1, 9])
@pytest.mark.parametrize("form", [*FORMATS, *ROUNDED], ids=str)
def test_rows_are_those_of_the_format(form: Format, superblocks: int, dtype: torch.dtype) -> None:
    N, K = 21, columns_of(form, superblocks)
    for scale_dtype in FLOAT_DTYPES:  # no parameter, because each case costs time
        tensors = stored_tensors(form, (N, K), scale_dtype)
        assert same_bytes(rows_of(form, tensors, N, K, dtype), form.dequantize(tensors, (N, K), dtype))


@pytest.mark.parametrize("form", [Affine(), *K_QUANTS, Table4(), Float8E4M3(128)], ids=str)
def test_one_token_is_multiplied_by_the_library_of_this_machine(form: Format) -> None:
    N, K = 9, columns_of(form, 2)
    tensors = stored_tensors(form, (N, K), torch.bfloat16)
    product = compiled.find(form, N, K, torch.bfloat16, tensors["scale"].dtype)
    if not compiled.is_available():
        pytest.skip("no library serves this machine")
    assert product is not None
    assert product.most_rows >= 4
    weight = QuantizedTensor(tensors, form, (N, K), torch.bfloat16)
    x = random_weight(1, K, dtype=torch.bfloat16)
    exact = x.double() @ weight.dequantize().double().t()
    result = torch.nn.functional.linear(x, weight)
    assert (result.double() - exact).norm() <= 1e-2 * exact.norm()


@pytest.mark.slow
@pytest.mark.covering(2)
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("at_end", [True, False], ids=["ends", "begins"])
@pytest.mark.parametrize("M", [1, 6, 20])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_nothing_around_the_tensors_is_read(form: Format, M: int, at_end: bool) -> None:
    N, K = 5, columns_of(form, 1)
    tensors, library = stored_tensors(form, (N, K), torch.float16), compiled.loaded_library()
    assert library is not None
    exact = form.dequantize(tensors, (N, K), torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        x = random_weight(M, K, dtype=dtype)
        result = product(library, form, tensors, x, at_end=at_end).double()
        expected = x.double() @ exact.t()
        assert (result - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.parametrize("form", [Affine(4, 64), Affine(6, 16, "k6", "none"), Table4(96)], ids=str)
def test_columns_that_are_no_full_groups_have_no_product(form: Format) -> None:
    assert compiled.find(form, 8, 1000, torch.float32, torch.float16) is None


@pytest.mark.slow
@pytest.mark.usefixtures("library")
def test_phases_of_damaged_files_lead_to_no_outer_scale_behind_the_last() -> None:
    form, N, K = Table4(64, "nested"), 9, 64 * 256
    tensors = stored_tensors(form, (N, K), torch.float32)
    assert tensors["outer_scale"].shape[1] == 1
    tensors["phase"].fill_(255)
    rows = rows_of(form, tensors, N, K, torch.float32)
    assert same_bytes(rows, form.dequantize(tensors, (N, K), torch.float32))
