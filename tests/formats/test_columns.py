"""Codes that are chosen column by column: those of `quantize`, unless columns matter differently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from weights import QUANTIZABLE

from hf_trainweights.files.coded_tensors import encode_tensors
from hf_trainweights.formats import get_format
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.columns import ColumnCodes

N, K = 24, 256
WITHOUT = ("int8", "float8_e4m3")
CONFIGS: list[dict[str, Any]] = [{"format": name} for name in QUANTIZABLE if name not in WITHOUT]
CONFIGS += [{"format": "uint3", "group_size": 32}, {"format": "int4", "group_size": 32}]


def a_weight(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(N, K, generator=generator) * torch.linspace(0.1, 3, K)
    weight[3] = 0
    weight[5, 32:64] = 0
    return weight.to(dtype)


def file_bits(tensors: Mapping[str, Tensor]) -> float:
    """Return how many bits a weight takes in a file."""
    return 8 * encode_tensors(tensors).numel()


def chosen(form: Format, weight: Tensor, importance: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors, and the values of the codes as they were chosen."""
    codes = form.columns(weight, importance)
    assert isinstance(codes, ColumnCodes)
    columns, size, rounds = weight.float().t().contiguous(), codes.group_size, 0
    while True:
        values = []
        for column in range(weight.shape[1]):
            if size and column % size == 0:
                codes.begin_group(column // size, columns[column : column + size])
            values.append(codes.encode(column, columns[column]))
        rounds += 1
        assert rounds < 9
        if not codes.again(file_bits):
            return codes.tensors(), torch.stack(values, dim=1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("config", [each for each in CONFIGS if each["format"] != "coded"], ids=str)
def test_columns_that_matter_alike_get_the_codes_of_quantize(config: dict[str, Any], dtype: torch.dtype) -> None:
    form, weight = get_format(config), a_weight(dtype)
    found, _ = chosen(form, weight, torch.ones(K))
    expected = form.quantize(weight)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("column_scale", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_tensors_hold_the_values_that_were_chosen(config: dict[str, Any], column_scale: bool) -> None:
    form, weight = get_format({**config, "column_scale": column_scale}), a_weight(torch.bfloat16)
    found, values = chosen(form, weight, torch.linspace(0.5, 4, K))
    form.check(found, weight.shape)
    assert all(tensor.is_contiguous() for tensor in found.values())
    if config["format"] != "coded":  # which keeps the best round, not always the last
        torch.testing.assert_close(form.dequantize(found, weight.shape, torch.float32), values, rtol=1e-6, atol=0)
    error = form.dequantize(found, weight.shape, torch.float32) - weight.float()
    assert error.norm() < 0.6 * weight.float().norm()  # of two bits it is half as much


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_errors_move_to_columns_that_matter_less(config: dict[str, Any]) -> None:
    form, weight = get_format(config), a_weight(torch.bfloat16)
    importance = torch.ones(K)
    importance[::2] = 100
    importance /= importance.mean()

    def cost(tensors: dict[str, Tensor]) -> float:
        error = form.dequantize(tensors, weight.shape, torch.float32) - weight.float()
        return (error.square() * importance).sum().item()

    alike, _ = chosen(form, weight, torch.ones(K))
    weighed, _ = chosen(form, weight, importance)
    assert cost(weighed) < cost(alike)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2.5, 3.0, 4.25])
def test_coded_columns_have_the_rate_and_less_error_than_nearest_codes(bits: float) -> None:
    form, weight = get_format({"format": "coded", "bits": bits}), a_weight(torch.bfloat16)
    codes = form.columns(weight, torch.ones(K))
    found, _ = chosen(form, weight, torch.ones(K))
    assert codes is not None
    chances = torch.bincount(found["qdata"].flatten().int() + 128).float() / (N * K)
    entropy = -(chances[chances > 0] * chances[chances > 0].log2()).sum().item()
    assert abs(entropy - bits) < 0.15
    plain = form.quantize(weight)
    errors = [(form.dequantize(each, weight.shape, torch.float32) - weight.float()).norm() for each in (found, plain)]
    assert errors[0] < errors[1]


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("bits", [3.0, 4.25])
@pytest.mark.parametrize("column_scale", [False, True])
def test_a_coded_file_has_the_bits_that_were_asked_for(bits: float, column_scale: bool) -> None:
    form = get_format({"format": "coded", "bits": bits, "column_scale": column_scale})
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    found, _ = chosen(form, weight, torch.ones(512))
    assert abs(file_bits(found) / weight.numel() - bits) < 0.007


@pytest.mark.parametrize("name", WITHOUT)
@pytest.mark.parametrize("column_scale", [False, True])
def test_formats_of_eight_bits_have_no_columns(name: str, column_scale: bool) -> None:
    form = get_format({"format": name, "column_scale": column_scale})
    assert form.columns(a_weight(torch.float32), torch.ones(K)) is None
