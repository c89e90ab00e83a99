"""What is particular to coded: the bits that a file takes, and outliers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_trainweights.errors import ConfigError
from hf_trainweights.files.coded_tensors import encode_tensors
from hf_trainweights.formats import get_format
from hf_trainweights.formats.coded import Coded

SHAPE = (512, 1024)


def weights(kind: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(SHAPE, generator=generator)
    uneven = torch.randn(SHAPE[0], 1, generator=generator).exp()
    return {
        "normal": normal,
        "long tails": normal * torch.randn(SHAPE, generator=generator).exp(),
        "rows of all sizes": normal * uneven,
        "half zeros": normal * (torch.randn(SHAPE, generator=generator) > 0),
        "uniform": torch.rand(SHAPE, generator=generator) - 0.5,
    }[kind].to(dtype)


def file_bits(form: Coded, weight: Tensor) -> float:
    return 8 * len(encode_tensors(form.quantize(weight))) / weight.numel()


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 2.5, 3, 3.5, 4.25, 5.5, 6.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_file_takes_the_bits_that_are_asked_for(bits: float, dtype: torch.dtype) -> None:
    assert file_bits(Coded(bits), weights("normal", dtype)) == pytest.approx(bits, rel=0.01)


@pytest.mark.parametrize("kind", ["rows of all sizes", "half zeros", "uniform"])
def test_so_it_does_whatever_the_distribution(kind: str) -> None:
    assert file_bits(Coded(3.5), weights(kind)) == pytest.approx(3.5, rel=0.03)


@pytest.mark.parametrize("kind", ["normal", "long tails"])
def test_rows_whose_codes_would_not_fit_a_byte_get_a_larger_step_and_no_wrong_value(kind: str) -> None:
    weight = weights(kind, torch.float32)
    form = Coded(8)
    tensors = form.quantize(weight)
    error = (form.dequantize(tensors, SHAPE, torch.float32) - weight).abs()
    assert (error <= tensors["scale"] * 0.5001).all()
    assert (tensors["scale"] <= weight.abs().amax(dim=-1, keepdim=True) / 127 * 1.13).all()
    assert file_bits(form, weight) < 8


def test_more_bits_are_more_exact() -> None:
    weight = weights("normal", torch.float32)
    errors = [
        (form.dequantize(form.quantize(weight), SHAPE, torch.float32) - weight).square().mean().item()
        for form in map(Coded, (2, 2.5, 3, 4, 5, 6))
    ]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("bits", [1.99, 8.01, 0, -3, "4", None, True, float("nan"), float("inf")])
def test_other_bits_are_refused(bits: object) -> None:
    with pytest.raises(ConfigError, match="bits: expected a number from 2 to 8 for coded, found"):
        get_format({"format": "coded", "bits": bits})


def test_a_whole_number_of_bits_is_the_same_format_as_a_real_one() -> None:
    assert get_format({"format": "coded", "bits": 4}) == get_format({"format": "coded", "bits": 4.0}) == Coded()
