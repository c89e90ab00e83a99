"""Error feedback: products with the inputs that it knows are nearer than without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_trainweights.formats import get_format
from hf_trainweights.models.calibration.feedback import Moments, quantize_with_feedback

CONFIGS: list[dict[str, Any]] = [
    {"format": "int4"},
    {"format": "codebook4"},
    {"format": "uint2", "group_size": 32},
    {"format": "uint6"},
    {"format": "coded", "bits": 3.0},
    {"format": "int4", "group_size": 32, "column_scale": True},
]
N, K = 48, 256


@pytest.fixture(scope="module")
def inputs() -> Tensor:
    """Tokens whose columns depend on one another, as in models."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(48, K, generator=generator)
    return torch.randn(4096, 48, generator=generator) @ mixing + 0.3 * torch.randn(4096, K, generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_products_with_known_inputs_are_nearer(config: dict[str, Any], inputs: Tensor) -> None:
    form = get_format(config)
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    seen, unseen = inputs[:3000], inputs[3000:]
    moments = Moments(K, weight.device)
    moments.add(seen, seen)
    quantized = quantize_with_feedback(weight, form, moments, moments.factor())
    assert quantized is not None

    def error(tensors: dict[str, Tensor]) -> float:
        difference = form.dequantize(tensors, weight.shape, torch.float32) - weight.float()
        return (unseen @ difference.t()).norm().item()

    assert error(quantized) < 0.75 * error(form.quantize(weight))


def test_inputs_that_do_not_depend_on_one_another_leave_the_codes_as_they_are() -> None:
    form, moments = get_format({"format": "int4"}), Moments(K, torch.device("cpu"))
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(1))
    moments.add(torch.eye(K), torch.eye(K))
    actual = quantize_with_feedback(weight, form, moments, moments.factor())
    assert actual is not None
    expected = form.quantize(weight)
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def test_a_format_that_gains_nothing_has_no_codes() -> None:
    moments = Moments(K, torch.device("cpu"))
    assert quantize_with_feedback(torch.ones(N, K), get_format({"format": "int8"}), moments, moments.factor()) is None
