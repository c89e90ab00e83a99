"""The Triton kernels on CPU tensors, by Triton's interpreter; `test_triton_products` runs this file in its own process.

The interpreter keeps bfloat16 as the bits of an integer: `tl.dot` multiplies these bits, and what is stored is cut off
instead of rounded. So of bfloat16 only the kernel for one row is run, and may miss by a unit in the last place.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import exhaustive
from helpers import assert_close_product
from torch import Tensor
from weights import random_weight

from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.kernels import cuda

# N and K within one block, of several blocks with a rest, and in several parts of K with a shorter last one.
CASES = [
    (Int8(), 7, 33),
    (Int8(64), 70, 1088),
    (Int4(32), 9, 96),
    (Int4(64), 33, 2304),
    *exhaustive(
        (Int8(), 1, 1),
        (Int8(), 130, 257),
        (Int8(), 80, 2304),
        (Int8(16), 9, 48),
        (Int8(256), 66, 512),
        (Int4(32), 70, 1056),
        (Int4(128), 129, 256),
        (Int4(128), 5, 128),
    ),
]
every_case = pytest.mark.parametrize(("form", "N", "K"), CASES, ids=str)


def assert_product(x: Tensor, tensors: dict[str, Tensor], form: Int8 | Int4, bias: Tensor | None = None) -> None:
    result = cuda.multiply(x, tensors["qdata"], tensors["scale"], bias)
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
        (16, torch.float32),
        (17, torch.float16),
        *exhaustive(*((M, torch.float16) for M in (1, 2, 16, 130))),
    ],
    ids=str,
)
def test_every_shape_keeps_the_bound(M: int, dtype: torch.dtype, form: Int8 | Int4, N: int, K: int) -> None:
    tensors = form.quantize(random_weight(N, K, dtype=dtype))
    bias = random_weight(N, dtype=dtype, seed=2) if M % 2 else None
    assert_product(random_weight(M, K, dtype=dtype, seed=1), tensors, form, bias)


@pytest.mark.exhaustive
@every_case
def test_one_row_of_bfloat16(form: Int8 | Int4, N: int, K: int) -> None:
    tensors = form.quantize(random_weight(N, K, dtype=torch.bfloat16))
    x, bias = random_weight(1, K, seed=1).bfloat16(), random_weight(N, seed=2).bfloat16()
    assert_product(x, tensors, form, bias)


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", [Int8(), Int8(32), Int4(32)], ids=str)
@pytest.mark.parametrize("M", [1, 20])
def test_strides_do_not_matter(form: Int8 | Int4, M: int) -> None:
    tensors = {name: tensor[::2] for name, tensor in form.quantize(random_weight(160, 96)).items()}
    assert_product(random_weight(2 * M, 192, seed=1)[::2, ::2], tensors, form, random_weight(160, seed=2)[::2])


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", [Int8(), Int8(32), Int4(32)], ids=str)
@pytest.mark.parametrize("M", [1, 20])
def test_a_scale_of_another_dtype_is_used_as_it_is(form: Int8 | Int4, M: int) -> None:
    assert_product(random_weight(M, 96, seed=1), form.quantize(random_weight(80, 96, dtype=torch.bfloat16)), form)


def before_a_forbidden_page(tensor: Tensor) -> Tensor:
    """Return a copy whose memory ends where the process may neither read nor write: to go on is to crash."""
    pages_bytes = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages_bytes + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + pages_bytes), mmap.PAGESIZE, 0) == 0
    bytes_ = torch.frombuffer(memory, dtype=torch.uint8, count=tensor.nbytes, offset=pages_bytes - tensor.nbytes)
    return bytes_.view(tensor.dtype).view(tensor.shape).copy_(tensor)


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

    tensors = form.quantize(random_weight(N, K))
    arguments = (random_weight(M, K, seed=1), tensors["qdata"], tensors["scale"], random_weight(N, seed=2))
    expected = cuda.multiply(*arguments)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty_before_a_forbidden_page)
    assert torch.equal(cuda.multiply(*map(before_a_forbidden_page, arguments)), expected)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.covering(1)
@pytest.mark.parametrize("form", [Int8(), Int8(32), Int4(32)], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_row(form: Int8 | Int4, value: float) -> None:
    tensors, x = form.quantize(random_weight(80, 96)), random_weight(20, 96, seed=1)
    expected = cuda.multiply(x, tensors["qdata"], tensors["scale"], None)
    x[3, 5] = value
    result = cuda.multiply(x, tensors["qdata"], tensors["scale"], None)
    assert not result[3].isfinite().any()
    assert torch.equal(result[:3], expected[:3])
    assert torch.equal(result[4:], expected[4:])


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", [Int8(), Int8(64), Int4(32)], ids=str)
@pytest.mark.parametrize(
    ("M", "dtype"), [(1, torch.float32), (16, torch.float32), (1, torch.float16), (128, torch.float16)], ids=str
)
def test_the_check_before_the_first_use_passes(M: int, dtype: torch.dtype, form: Int8 | Int4) -> None:
    assert cuda._check(M, dtype, dtype, torch.device("cpu"), form)
