"""What a report measures of a weight, against the same measured on the whole float tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import default_dtype, snr_db
from safetensors.torch import save_file
from weights import QUANTIZABLE, random_weight

from hf_trainweights import compare_checkpoints
from hf_trainweights.formats import get_format
from hf_trainweights.report import measurements
from hf_trainweights.report.measurements import code_histogram, measure_error, weight_histogram
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor


def quantized(weight: torch.Tensor, name: str, *, transposed: bool = False) -> QuantizedTensor:
    return QuantizedTensor.quantize(weight, get_format({"format": name}), transposed)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "BLOCK_ELEMENTS", 1000)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(24, 256), (3, 128, 256)])
@pytest.mark.parametrize("name", QUANTIZABLE)
def test_error_in_blocks_is_that_of_the_whole_weight(name: str, shape: tuple[int, ...], transposed: bool) -> None:
    weight = random_weight(*shape)
    if transposed:
        weight = weight.transpose(-1, -2).contiguous()
    held = quantized(weight, name, transposed=transposed)
    error = measure_error(held, weight)
    assert error is not None
    assert error.snr_db == pytest.approx(snr_db(weight, held.dequantize()), abs=1e-3)
    a, b = (each.mT if transposed else each for each in (held.dequantize(), weight))
    x = torch.randn(32, a.shape[-1], generator=torch.Generator().manual_seed(0))
    assert error.output_error == pytest.approx(((x @ (a - b).mT).norm() / (x @ b.mT).norm()).item(), rel=1e-4)


def test_equal_weights_have_no_error() -> None:
    weight = random_weight(8, 64)
    error = measure_error(weight.to(torch.bfloat16), weight.to(torch.bfloat16))
    assert error is not None
    assert (error.snr_db, error.output_error) == (math.inf, 0.0)


def test_the_same_weights_give_the_same_error() -> None:
    weight = random_weight(8, 64)
    first = measure_error(quantized(weight, "int8"), weight)
    with default_dtype(torch.bfloat16):
        assert measure_error(quantized(weight, "int8"), weight) == first


@pytest.mark.parametrize(
    "pair",
    [
        (torch.ones(4, 8), torch.ones(8, 4)),
        (torch.ones(4, 8, dtype=torch.int64), torch.ones(4, 8)),
    ],
)
def test_weights_that_are_no_counterparts_are_not_compared(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert measure_error(*pair) is None


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("pack", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_a_sparse_weight_is_measured_as_the_dense_one(pack: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight, other = torch.eye(4, 8), random_weight(4, 8)
    assert measure_error(pack(weight), other) == measure_error(weight, other)
    assert weight_histogram(pack(weight)) == weight_histogram(weight)


def test_float4_is_measured_by_its_values() -> None:
    octets = torch.tensor([[0x10, 0x32, 0x54, 0x76], [0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    weight, whole = octets.view(torch.float4_e2m1fn_x2), torch.stack([values, -values])
    assert measure_error(weight, whole) == measure_error(whole, whole)
    assert weight_histogram(weight) == weight_histogram(whole)
    assert measure_error(weight, torch.zeros(2, 4)) is None


@pytest.mark.parametrize("weight", [torch.zeros(4, 8), torch.full((4, 8), math.nan), torch.zeros(0, 8), torch.ones(3)])
def test_odd_weights_are_measured_without_an_error(weight: torch.Tensor) -> None:
    assert measure_error(weight, torch.ones_like(weight)) is not None
    assert measure_error(torch.ones_like(weight), weight) is not None
    weight_histogram(weight)


def test_a_histogram_counts_every_value_once() -> None:
    weight = random_weight(24, 256)
    found = weight_histogram(weight)
    assert found is not None
    assert (sum(found.counts), found.low, found.high) == (weight.numel(), weight.min(), weight.max())
    assert list(found.counts) == torch.histc(weight.double(), 64).int().tolist()


@pytest.mark.parametrize("weight", [torch.zeros(0, 8), torch.full((4, 8), math.inf)])
def test_there_is_no_histogram_of_nothing_and_of_infinities(weight: torch.Tensor) -> None:
    assert weight_histogram(weight) is None


def test_codes_of_int8_are_its_stored_bytes() -> None:
    held = quantized(random_weight(24, 256), "int8")
    found, codes = code_histogram(held), held.tensors["qdata"].double()
    assert found is not None
    assert (found.low, found.high) == (codes.min() - 0.5, codes.max() + 0.5)
    assert list(found.counts) == torch.histc(codes, 64, found.low, found.high).int().tolist()


def test_codes_of_int4_have_a_bin_each() -> None:
    found = code_histogram(quantized(random_weight(24, 256), "int4"))
    assert found is not None
    assert (len(found.counts), found.low, found.high) == (16, -8.5, 7.5)
    assert sum(found.counts) == 24 * 256
    assert all(found.counts)


@pytest.mark.parametrize(("name", "codes"), [("uint2", 4), ("uint3", 8), ("uint6", 64), ("codebook4", 16)])
def test_codes_of_groups_with_more_than_a_scale_have_a_bin_each(name: str, codes: int) -> None:
    found = code_histogram(quantized(random_weight(24, 256), name))
    assert found is not None
    assert (len(found.counts), found.low, found.high) == (codes, -0.5, codes - 0.5)
    assert sum(found.counts) == 24 * 256


def test_a_float_weight_has_no_codes() -> None:
    assert code_histogram(random_weight(4, 8)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_the_error_is_the_one_that_a_comparison_of_files_tells(
    dtype: torch.dtype, transposed: bool, tmp_path: Path
) -> None:
    reference = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = QuantizedTensor.quantize(reference, get_format({"format": "int8"}), transposed)
    found = measure_error(weight, reference)
    save_file({"w": reference}, tmp_path / "a.safetensors")
    save_file({"w": weight.dequantize().contiguous()}, tmp_path / "b.safetensors")
    told = compare_checkpoints(tmp_path / "a.safetensors", tmp_path / "b.safetensors").tensors[0].snr_db
    assert found is not None
    assert found.snr_db == pytest.approx(told, abs=1e-9)


@pytest.mark.parametrize("shape", [(2**50, 0), (2**50, 0, 1), (0, 2**50), (0,)])
def test_a_weight_without_elements_takes_no_time(shape: tuple[int, ...]) -> None:
    weight = torch.empty(shape)
    found = measure_error(weight, weight)
    assert found is not None
    assert (found.snr_db, found.output_error) == (math.inf, 0.0 if len(shape) > 1 else None)
    assert weight_histogram(weight) is None
