"""CUDA C for few rows, run on a CPU: every thread in plain C++, and all that Python does before and after a launch."""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from covering import by_default, exhaustive
from emulated_gpu import emulated_gpu, kernel_cache, needs_compiler
from torch import Tensor
from weights import random_weight, stored_tensors

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.formats.affine import Affine
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.codebook4 import Codebook4
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.table4 import Table4
from hf_trainweights.kernels import few_rows
from hf_trainweights.testing.values import assert_close_product

__all__ = ["emulated_gpu", "kernel_cache"]  # fixtures

pytestmark = [needs_compiler, pytest.mark.slow]  # each kernel is compiled for a second

TILE = {"ROW_TILES": 1, "COLUMN_TILES": 1, "WARPS": 2, "STAGES": 2, "BLOCKS": 1}
BFLOAT16, HALF = torch.bfloat16, torch.float16

# One of each way to scale: sums, codes in 16 bits, exchanged words; of each kind of codes, scales and offsets.
DEFAULT = [
    *(Int4(128), Int4(32), Int8(), Int8(128), Float8E4M3(), Float8E4M3(32, "e8m0")),
    *(Affine(4, 128), Affine(4, 64, offset="bias"), Affine(4, None), Affine(4, 32, "k4", "none")),
    *(Table4(32, "e8m0"), Table4(16, "e4m3"), Table4(64, "nested")),
]
FORMS: list[Format] = [
    *DEFAULT,
    *(Int4(64), Int8(64), Int8(32), Int8(16), Int8(8), Int8(96), Float8E4M3(128), Float8E4M3(48)),
    *(Affine(4, size) for size in (8, 16, 32, 64, 96, 256)),
    *(
        Affine(4, 64, offset="zero_point_minus_1"),
        Affine(4, 128, offset="float_zero_point"),
        Affine(4, 64, offset="none"),
    ),
    *(Affine(4, 32, offset="bias", rounding="each"), Affine(4, 128, offset="bias"), Affine(4, None, offset="none")),
    *(Table4(32, "iq4_xs"), Table4(64), Table4(128), Table4(16, "e4m3_divided"), Table4(128, "nested")),
]
every_form = pytest.mark.parametrize("form", by_default(DEFAULT, FORMS), ids=str)
every_dtype = pytest.mark.parametrize("dtype", [BFLOAT16, HALF], ids=str)


def placed(tensor: Tensor) -> Tensor:
    """Return a copy at a multiple of 16 bytes, where allocations of a GPU begin."""
    memory = torch.empty(tensor.nbytes + 16, dtype=torch.uint8)
    start = -memory.data_ptr() % 16
    return memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def stored(form: Format, N: int, K: int, dtype: torch.dtype, lead: tuple[int, ...] = ()) -> dict[str, Tensor]:
    return {name: placed(tensor) for name, tensor in stored_tensors(form, (*lead, N, K), dtype).items()}


def columns_of(form: Format, least: int) -> int:
    """Return a number of columns that groups and a lane's loads divide, but not a segment if that is possible."""
    step = torch.tensor([form.column_step, 128 // (8 if isinstance(form, (Int8, Float8E4M3)) else 4)])
    step = int(torch.lcm(*step))
    if getattr(form, "group_size", None) and not isinstance(form, Float8E4M3):
        step = int(torch.lcm(torch.tensor(step), torch.tensor(form.group_size)))
    return -(-least // step) * step


def assert_product(
    form: Format, dtype: torch.dtype, M: int, N: int, K: int, tile: dict[str, int] | None = None,
    scale_dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    tensors = stored(form, N, K, scale_dtype or dtype)
    x, bias = random_weight(M, K, dtype=dtype, seed=1), random_weight(N, dtype=dtype, seed=2)
    result = few_rows.multiply(tensors, form, K, dtype, tile or TILE)(placed(x), bias)
    dense = F.linear(x, form.dequantize(tensors, (N, K), dtype), bias)
    assert_close_product(
        result, dense, F.linear(x.double(), form.dequantize(tensors, (N, K), torch.float64), bias.double())
    )


@pytest.mark.covering(1)
@every_form
@every_dtype
@pytest.mark.parametrize(("M", "N", "least"), [(1, 20, 400), (3, 33, 500), *exhaustive((8, 16, 64), (5, 1, 1100))])
def test_products_keep_the_bound(
    form: Format, dtype: torch.dtype, M: int, N: int, least: int, emulated_gpu: SimpleNamespace
) -> None:
    assert_product(form, dtype, M, N, columns_of(form, least))


@pytest.mark.covering(1)
@every_dtype
@pytest.mark.parametrize("form", [Int4(128), Int8(), Table4(64), Affine(4, 64, offset="bias")], ids=str)
def test_scales_may_be_float32(form: Format, dtype: torch.dtype, emulated_gpu: SimpleNamespace) -> None:
    assert_product(form, dtype, 2, 20, columns_of(form, 300), scale_dtype=torch.float32)


@pytest.mark.parametrize("M", [9, 16, *exhaustive(13)])
@pytest.mark.parametrize(
    "form", [Int4(128), *exhaustive(Int8(), Table4(32, "e8m0"), Affine(4, 32, "k4", "none"))], ids=str
)
@pytest.mark.parametrize(
    "tile",
    [
        {"ROW_TILES": 2, "COLUMN_TILES": 2, "WARPS": 4, "STAGES": 1, "BLOCKS": 2},
        *exhaustive({"ROW_TILES": 1, "COLUMN_TILES": 2, "WARPS": 1, "STAGES": 4, "BLOCKS": 1}),
    ],
    ids=str,
)
def test_tiles_have_any_shape(form: Format, M: int, tile: dict[str, int], emulated_gpu: SimpleNamespace) -> None:
    assert_product(form, BFLOAT16, M, 40, columns_of(form, 700), tile)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("form", [Int4(128), Int8(), *exhaustive(*DEFAULT[1:])], ids=str)
def test_what_is_not_finite_stays_in_its_row(form: Format, value: float, emulated_gpu: SimpleNamespace) -> None:
    K = columns_of(form, 300)
    tensors, x = stored(form, 20, K, BFLOAT16), placed(random_weight(4, K, dtype=BFLOAT16, seed=1))
    multiply = few_rows.multiply(tensors, form, K, BFLOAT16, TILE)
    expected = multiply(x, None)
    x[2, 5] = value
    result = multiply(x, None)
    zeros = form.dequantize(tensors, (20, K), torch.float32)[:, 5] == 0
    assert not result[2, ~zeros].isfinite().any()
    assert torch.equal(result[[0, 1, 3]], expected[[0, 1, 3]])


@pytest.mark.covering(1)
@pytest.mark.parametrize("counts", [[0, 3, 0, 6], [9, 0, 0, 0], [0, 0, 0, 17]], ids=str)
@pytest.mark.parametrize("form", by_default([Int4(32), Table4(32, "e8m0")], DEFAULT), ids=str)
def test_rows_meet_their_experts(form: Format, counts: list[int], emulated_gpu: SimpleNamespace) -> None:
    K, M = columns_of(form, 200), sum(counts)
    tensors, x = stored(form, 20, K, BFLOAT16, lead=(4,)), random_weight(M, K, dtype=BFLOAT16, seed=1)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    result = few_rows.multiply(tensors, form, K, BFLOAT16, TILE)(placed(x), None, ends)
    weights = form.dequantize(tensors, (4, 20, K), torch.float64)
    exact = torch.cat([rows.double() @ weight.t() for rows, weight in zip(x.split(counts), weights, strict=True)])
    pairs = zip(x.split(counts), weights.to(BFLOAT16), strict=True)
    assert_close_product(result, torch.cat([rows @ weight.t() for rows, weight in pairs]), exact)
    # One launch, whatever the counts are, and no count is read by the host.
    assert len(emulated_gpu.driver.launched) == 1


def test_rows_of_the_weight_and_x_may_lie_anywhere(emulated_gpu: SimpleNamespace) -> None:
    tensors = stored(Int4(32), 40, 256, BFLOAT16)
    sliced = {name: tensor[::2] for name, tensor in tensors.items()}
    whole = {name: placed(tensor) for name, tensor in sliced.items()}
    memory = placed(torch.zeros(257, dtype=BFLOAT16))
    x = memory[1:].copy_(random_weight(256, dtype=BFLOAT16, seed=1))
    assert few_rows.reads(sliced)
    results = [few_rows.multiply(each, Int4(32), 256, BFLOAT16, TILE)(x, None) for each in (sliced, whole)]
    assert torch.equal(*results)


def test_a_weight_with_more_rows_than_a_grid_is_left_to_others() -> None:
    rows = 65535 * 16
    tensors = {"qdata": torch.empty(1, 64, dtype=torch.int8), "scale": torch.empty(1, 1)}
    assert few_rows.reads({name: placed(tensor).expand(rows, -1) for name, tensor in tensors.items()})
    assert not few_rows.reads({name: placed(tensor).expand(rows + 1, -1) for name, tensor in tensors.items()})


@pytest.mark.parametrize("name", ["qdata", "scale"])
def test_rows_that_a_lane_cannot_load_are_left_to_others(name: str) -> None:
    tensors = stored(Int4(32), 20, 256, BFLOAT16)
    assert few_rows.reads(tensors)
    memory = torch.zeros(20, tensors[name].shape[1] + 1, dtype=tensors[name].dtype)
    shifted = memory[:, 1:] if name == "qdata" else tensors[name].t().contiguous().t()
    assert not few_rows.reads({**tensors, name: shifted})


@pytest.mark.parametrize(
    ("form", "K", "dtype", "scale_dtype"),
    [
        (Int4(32), 96, torch.float32, torch.float32),
        (Int4(32), 96, BFLOAT16, HALF),
        (Int8(), 40, BFLOAT16, BFLOAT16),  # a row ends within the load of a lane
        (Int8(24), 48, BFLOAT16, BFLOAT16),
        (Int8(4), 48, BFLOAT16, BFLOAT16),
        (Int8(8), 48, BFLOAT16, torch.float32),
        (Table4(16), 48, BFLOAT16, BFLOAT16),
        (Affine(3, 32), 96, BFLOAT16, BFLOAT16),
        (Affine(8, 32), 96, BFLOAT16, BFLOAT16),
        (Affine(4, None, offset="bias"), 96, BFLOAT16, BFLOAT16),
        (Codebook4(), 96, BFLOAT16, BFLOAT16),
        (Int8(), 0, BFLOAT16, BFLOAT16),
    ],
    ids=str,
)
def test_other_weights_are_left_to_others(form: Format, K: int, dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    assert few_rows.macros_of(form, K, dtype, scale_dtype) is None


def test_a_launch_goes_on_the_current_stream_and_reads_the_current_memory(emulated_gpu: SimpleNamespace) -> None:
    tensors, x = stored(Int8(), 20, 64, BFLOAT16), placed(random_weight(1, 64, dtype=BFLOAT16, seed=1))
    multiply = few_rows.multiply(tensors, Int8(), 64, BFLOAT16, TILE)
    first = multiply(x, None)
    emulated_gpu.stream = 9
    # As FSDP does, which frees the memory of a weight and gathers it again.
    tensors["scale"].set_(placed(-tensors["scale"]))
    assert torch.equal(multiply(x, None), -first)
    assert emulated_gpu.driver.launched == [((1, 2), 64, 7), ((1, 2), 64, 9)]


def test_weights_of_one_layout_share_a_launch_that_holds_none_of_them(emulated_gpu: SimpleNamespace) -> None:
    x, results = placed(random_weight(1, 64, dtype=BFLOAT16, seed=1)), []
    for factor in (1, -1):
        tensors = stored(Int8(), 20, 64, BFLOAT16)
        tensors["scale"].mul_(factor)
        results.append(few_rows.multiply(tensors, Int8(), 64, BFLOAT16, TILE)(x, None))
    assert torch.equal(results[0], -results[1])
    assert few_rows._plan.cache_info().currsize == 1
    left = weakref.ref(tensors["qdata"])
    del tensors
    assert left() is None


def test_threads_do_not_share_arguments(emulated_gpu: SimpleNamespace) -> None:
    tensors = stored(Int8(), 20, 64, BFLOAT16)
    multiply = few_rows.multiply(tensors, Int8(), 64, BFLOAT16, TILE)
    launch, addresses = emulated_gpu.driver.cuLaunchKernel, []
    emulated_gpu.driver.cuLaunchKernel = lambda *args: addresses.append(list(args[9])) or launch(*args)
    multiply(placed(random_weight(1, 64, dtype=BFLOAT16)), None)
    thread = threading.Thread(target=multiply, args=(placed(random_weight(1, 64, dtype=BFLOAT16)), None))
    thread.start()
    thread.join()
    assert not set(addresses[0]) & set(addresses[1])


def test_an_error_of_the_driver_is_raised(emulated_gpu: SimpleNamespace) -> None:
    multiply = few_rows.multiply(stored(Int8(), 20, 64, BFLOAT16), Int8(), 64, BFLOAT16, TILE)
    emulated_gpu.driver.failure = 700
    with pytest.raises(UnsupportedError, match="cuLaunchKernel: expected success, found error 700"):
        multiply(placed(random_weight(1, 64, dtype=BFLOAT16)), None)
