"""What a model returns as tensors that a reader without Transformers knows, and the mode that an export holds it in."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import pytest
import torch
from architectures import ARCHITECTURES
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hf_trainweights import quantize_
from hf_trainweights.exports import export_program, export_torchscript
from hf_trainweights.exports.sources import NamedCall, OrderedCall, in_eval_mode


def test_tensors_within_other_outputs_are_outputs_too() -> None:
    architecture = ARCHITECTURES["clip"]
    model, inputs = architecture.build(torch.float32).eval(), architecture.make_inputs()
    with torch.no_grad():
        wanted = model(**inputs, output_hidden_states=True)
        outputs = NamedCall(model, {"output_hidden_states": True})(**inputs)
        ordered = OrderedCall(model, list(inputs), {"output_hidden_states": True})(*inputs.values())
    tensors = [leaf for leaf in tree_leaves(wanted.to_tuple()) if isinstance(leaf, Tensor)]
    assert len(outputs) == len(tensors) > 8
    assert torch.equal(outputs["text_model_output.last_hidden_state"], wanted.text_model_output.last_hidden_state)
    assert torch.equal(outputs["vision_model_output.hidden_states.0"], wanted.vision_model_output.hidden_states[0])
    assert all(map(torch.equal, ordered, outputs.values()))


def test_a_cache_is_no_output() -> None:
    architecture = ARCHITECTURES["llama"]
    model, inputs = architecture.build(torch.float32).eval(), architecture.make_inputs()
    assert list(NamedCall(model, {"use_cache": True})(**inputs)) == ["logits"]


class Telling(nn.Module):
    """A module that does more than note its mode, and one in it that stays in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Dropout().eval()
        self.heard: list[str] = []

    def eval(self) -> Self:
        self.heard.append("eval")
        return super().eval()

    def train(self, mode: bool = True) -> Self:
        self.heard += ["train"] if mode else []
        return super().train(mode)


def test_a_model_is_told_of_both_changes_of_its_mode() -> None:
    model = nn.Sequential(nn.Dropout(), Telling())
    model[0].eval()
    before = [module.training for module in model.modules()]
    assert before == [True, False, True, False]
    with in_eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before
    assert model[1].heard[-1:] == ["train"]

    telling = Telling()
    with in_eval_mode(telling):
        assert telling.heard == ["eval"]
    assert telling.heard == ["eval", "train"]


def test_a_model_in_eval_mode_stays_in_it() -> None:
    telling = Telling().eval()
    with in_eval_mode(telling):
        pass
    assert not telling.training
    assert "train" not in telling.heard


class Merging(nn.Module):
    """A layer and an adapter, which is part of the bias in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        nn.init.zeros_(self.layer.bias)
        self.adapter = nn.Parameter(torch.ones(64))

    def train(self, mode: bool = True) -> Self:
        if mode != self.training:
            self.layer.bias.data += self.adapter.data * (-1 if mode else 1)
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + (self.adapter if self.training else 0)


@pytest.mark.slow
def test_a_file_has_the_weights_of_eval_mode_and_the_model_its_own_again(tmp_path: Path) -> None:
    model, x = Merging(), torch.ones(1, 64)
    quantize_(model, "int8")
    before = model(x)
    export_torchscript(model, tmp_path / "model.pt", x)
    export_program(model, tmp_path / "model.pt2", x)
    assert torch.equal(model(x), before)
    for program in (torch.jit.load(tmp_path / "model.pt"), torch.export.load(tmp_path / "model.pt2").module()):
        torch.testing.assert_close(program(x), before, rtol=1e-6, atol=1e-6)
