"""A module with quantized weights computes the same after every way to save and load it."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from torch import Tensor, nn
from torch.nn import functional as F
from weights import random_weight

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, quantize_
from hf_trainweights.formats.int4 import Int4

CONFIG = TrainWeightsConfig("int4", group_size=32, include_embeddings=True)
ROWS = (1, 7, 41)


class Experts(nn.Module):
    """Three experts in one parameter, each applied to its share of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(random_weight(3, 64, 64, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([F.linear(x, expert) for expert in self.down_proj.unbind()]).sum(0)


def make() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64, bias=False), Experts())
    # A head that is tied to a table, and a table alone.
    module.tied, module.head = nn.Embedding(128, 64), nn.Linear(64, 128, bias=False)
    module.head.weight = module.tied.weight
    module.table = nn.Embedding(128, 64)
    return module.bfloat16()


def quantized() -> nn.Module:
    module = make()
    experts = module[2].down_proj
    quantize_(module, CONFIG)
    module[2].down_proj = nn.Parameter(QuantizedTensor.quantize(experts, Int4(32)), requires_grad=False)
    return module


def skeleton() -> nn.Module:
    with torch.device("meta"):
        return make()


def through_file(value: Any, **options: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    return torch.load(io.BytesIO(stream.getvalue()), **options)


def assigned(module: nn.Module, state_dict: dict[str, Tensor]) -> nn.Module:
    module.load_state_dict(state_dict, assign=True)
    return module


def tied_again(module: nn.Module) -> nn.Module:
    module.head.weight = module.tied.weight
    return module


RELOADS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "state dict": lambda module: assigned(skeleton(), through_file(module.state_dict())),
    "state dict of parameters": lambda m: assigned(
        skeleton().requires_grad_(False), through_file(m.state_dict(keep_vars=True))
    ),
    "state dict on meta": lambda module: assigned_on_meta(module),
    "whole module": lambda module: through_file(module, weights_only=False),
    "state dict, tied again": lambda m: tied_again(assigned(skeleton(), through_file(m.state_dict()))),
}


def assigned_on_meta(module: nn.Module) -> nn.Module:
    with torch.device("meta"):
        return assigned(make(), through_file(module.state_dict()))


def results(module: nn.Module, rows: int) -> list[Tensor]:
    indices = torch.arange(rows) * 5 % 128
    x = random_weight(rows, 64, dtype=torch.bfloat16, seed=rows)
    looked_up = [module.tied(indices), module.table(indices)]
    hidden = module[2](module[1](module[0](x)))
    return [hidden, module.head(x), *looked_up]


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("inference", [True, False], ids=["inference", "training"])
@pytest.mark.parametrize("name", RELOADS)
def test_a_reloaded_module_computes_exactly_as_the_saved_one(name: str, inference: bool, rows: int) -> None:
    module = quantized()
    reloaded = RELOADS[name](module)
    with torch.set_grad_enabled(not inference):
        pairs = zip(results(reloaded, rows), results(module, rows), strict=True)
        assert all(torch.equal(actual, expected) for actual, expected in pairs)


def test_a_tied_weight_of_a_whole_module_stays_one() -> None:
    reloaded = through_file(quantized(), weights_only=False)
    assert reloaded.head.weight is reloaded.tied.weight


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "llama_tied", "qwen3_moe"])
def test_a_transformers_model_is_reloaded_from_its_state_dict(architecture: str) -> None:
    model = ARCHITECTURES[architecture].build(torch.bfloat16)
    quantize_(model, TrainWeightsConfig("int4", group_size=32))
    with torch.device("meta"):
        empty = type(model)(model.config)
    empty.load_state_dict(through_file(model.state_dict()), assign=True)
    empty.tie_weights()
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        setattr(empty.get_submodule(owner), leaf, buffer)
    prompt = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        for rows in (prompt, prompt[:, :1], prompt.repeat(1, 12)):
            assert torch.equal(empty.eval()(rows).logits, model.eval()(rows).logits)
