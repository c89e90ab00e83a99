"""The codes of `coded` that are chosen column by column: as many bits as were asked for, and less error."""

from __future__ import annotations

import pytest
import torch

from hf_trainweights.formats import get_format
from hf_trainweights.testing.formats import choose_columns, file_bits, uneven_weight


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2.5, 3.0, 4.25])
def test_coded_columns_have_the_rate_and_less_error_than_nearest_codes(bits: float) -> None:
    form, weight = get_format({"format": "coded", "bits": bits}), uneven_weight(torch.bfloat16)
    codes = form.columns(weight, torch.ones(256))
    found, _ = choose_columns(form, weight, torch.ones(256))
    assert codes is not None
    chances = torch.bincount(found["qdata"].flatten().int() + 128).float() / weight.numel()
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
    found, _ = choose_columns(form, weight, torch.ones(512))
    assert abs(file_bits(found) / weight.numel() - bits) < 0.007
