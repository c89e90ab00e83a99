"""Weights that a module's own code writes to stay float."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import DECODER, random_ids
from torch import Tensor, nn
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, quantize_
from hf_trainweights.models.choosing.selection import WRITTEN
from hf_trainweights.models.choosing.written_weights import written_weights


class Clamping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.weight.data.clamp_(-1, 1)
        return super().forward(x)


class Child(Clamping):
    """Has the method by inheritance alone."""


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.reading = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.layers = nn.ModuleList([nn.ModuleDict({"gate": nn.Linear(64, 64), "up": nn.Linear(64, 64)})])
        self.second.weight.data.mul_(2)

    def scale(self) -> None:
        with torch.no_grad():
            self.first.weight[0].zero_()
            for layer in self.layers:
                layer.gate.weight.mul_(2)  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        self.scale()
        return self.reading(x) * self.reading.weight.sum().clone().mul_(2)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Sequential(Clamping(64, 64), nn.Linear(64, 64)), {"0.weight"}),
        (nn.Sequential(nn.Linear(64, 64), Child(64, 64)), {"1.weight"}),
        (nn.Sequential(Parent()), {"0.first.weight", "0.layers.0.gate.weight"}),
        (nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)), set()),
    ],
)
def test_writes_are_found_in_the_code_of_classes(module: nn.Module, expected: set[str]) -> None:
    assert written_weights(module) == expected


def test_such_a_weight_is_float_unless_an_override_names_it() -> None:
    layers = nn.Sequential(Clamping(64, 64), nn.Linear(64, 64))
    reasons = {choice.name: choice.reason for choice in quantize_(layers, "int8")}
    assert reasons["0.weight"] == WRITTEN
    layers(torch.ones(1, 64))
    layers = nn.Sequential(Clamping(64, 64), nn.Linear(64, 64))
    quantize_(layers, TrainWeightsConfig("int8", overrides={"0": "int8"}))
    assert isinstance(layers[0].weight, QuantizedTensor)


def test_gemma_3n_which_clamps_a_weight_trains() -> None:
    sizes: dict[str, Any] = {**DECODER, "intermediate_size": [128], "num_hidden_layers": 1, "head_dim": 16}
    sizes |= {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 32, "laurel_rank": 16}
    sizes |= {"altup_num_inputs": 2, "num_kv_shared_layers": 0, "layer_types": ["full_attention"]}
    values = Gemma3nTextConfig(**sizes, activation_sparsity_pattern=[0.0], altup_coef_clip=120.0)
    model = Gemma3nForCausalLM(values)
    done = quantize_(model, "int8")
    assert [choice.name for choice in done if choice.reason == WRITTEN] == [
        "model.layers.0.altup.prediction_coefs.weight"
    ]
    model.get_input_embeddings().requires_grad_(False)
    ids = random_ids()
    loss: Any = model.train()(input_ids=ids, labels=ids).loss
    loss.backward()
    assert loss.isfinite()
