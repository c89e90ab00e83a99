"""Experts: their inputs are seen however a model multiplies, and each gets codes of its own."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES
from torch import Tensor
from torch.nn import functional as F

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, quantize_
from hf_trainweights.files.spill import Spill
from hf_trainweights.formats import get_format
from hf_trainweights.models.calibration.blocks import ExpertInputs
from hf_trainweights.models.calibration.feedback import quantize_experts_with_feedback

E, N, K = 3, 16, 64
CONFIG = TrainWeightsConfig("int4", group_size=32)


def experts() -> Tensor:
    return torch.randn(E, N, K, generator=torch.Generator().manual_seed(0))


def tokens(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 8, generator=generator) @ torch.randn(8, K, generator=generator)


def test_inputs_of_parts_of_a_weight_are_seen(tmp_path: Path) -> None:
    weight, other = experts(), experts()
    transposed = weight.transpose(1, 2).contiguous()
    x, y = tokens(5, 1), tokens(7, 2)
    with ExpertInputs(weight, Spill(tmp_path)) as inputs:
        F.linear(x, weight[2])
        y @ weight[0].t()
        F.linear(x, other[1])
        F.linear(x, QuantizedTensor.quantize(other[1], CONFIG.default_format))
        torch.mm(x, torch.ones(K, N))
    assert [torch.cat(rows).tolist() if rows else None for rows in inputs.rows] == [y.tolist(), None, x.tolist()]
    with ExpertInputs(transposed, Spill(tmp_path)) as inputs:
        torch.matmul(x, transposed[1])
    assert [len(rows) for rows in inputs.rows] == [0, 1, 0]


def test_of_products_of_all_experts_at_once_zeros_are_left_out(tmp_path: Path) -> None:
    weight = experts().transpose(1, 2).contiguous()
    x = torch.stack([tokens(4, seed) for seed in range(E)])
    x[1, 2:] = 0
    x[2] = 0
    with ExpertInputs(weight, Spill(tmp_path)) as inputs:
        torch.bmm(x, weight)
    assert [sum(map(len, rows)) for rows in inputs.rows] == [4, 2, 0]


@pytest.mark.parametrize(
    "config", [{"format": "uint2"}, {"format": "int4", "group_size": 32, "column_scale": True}], ids=str
)
def test_each_expert_is_nearer_on_its_own_inputs(config: dict[str, object]) -> None:
    form, weight = get_format(config), experts()
    seen = [[tokens(400, 1)], [tokens(400, 2)], []]
    quantized = quantize_experts_with_feedback(weight, form, seen)
    form.check(quantized, weight.shape)
    errors = [
        form.dequantize(stored, weight.shape, torch.float32) - weight for stored in (quantized, form.quantize(weight))
    ]
    for expert in range(2):
        calibrated, plain = ((seen[expert][0] @ error[expert].t()).norm().item() for error in errors)
        assert calibrated < 0.6 * plain
    # An expert that gets nothing is quantized for what the others get.
    calibrated, plain = ((torch.cat((seen[0][0], seen[1][0])) @ error[2].t()).norm().item() for error in errors)
    assert calibrated < plain


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_of_a_model_are_calibrated(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    before = copy.deepcopy(model.config.to_dict())
    inputs = [architecture.inputs(model) for _ in range(4)]
    summary = quantize_(model, CONFIG, calibration=inputs)
    merged = [each for each in summary.quantized if model.get_parameter(each.name).dim() == 3]
    assert merged
    assert not [each for each in merged if each.reason]
    assert all(isinstance(model.get_parameter(each.name), QuantizedTensor) for each in merged)
    assert summary.calibrated is not None
    assert summary.calibrated.error_after < summary.calibrated.error_before
    after = model.config.to_dict()
    after.pop("quantization_config")
    assert after == before
