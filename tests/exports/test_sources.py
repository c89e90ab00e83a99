"""What a model of Transformers returns, as tensors that a reader without Transformers knows."""

from __future__ import annotations

import torch
from architectures import ARCHITECTURES
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hf_trainweights.exports.sources import NamedCall, OrderedCall


def test_tensors_within_other_outputs_are_outputs_too() -> None:
    architecture = ARCHITECTURES["clip"]
    model, inputs = architecture.build(torch.float32).eval(), architecture.make_inputs()
    with torch.no_grad():
        wanted = model(**inputs, output_hidden_states=True)
        found = NamedCall(model, {"output_hidden_states": True})(**inputs)
        ordered = OrderedCall(model, list(inputs), {"output_hidden_states": True})(*inputs.values())
    tensors = [each for each in tree_leaves(wanted.to_tuple()) if isinstance(each, Tensor)]
    assert len(found) == len(tensors) > 8
    assert torch.equal(found["text_model_output.last_hidden_state"], wanted.text_model_output.last_hidden_state)
    assert torch.equal(found["vision_model_output.hidden_states.0"], wanted.vision_model_output.hidden_states[0])
    assert all(map(torch.equal, ordered, found.values()))


def test_a_cache_is_no_output() -> None:
    architecture = ARCHITECTURES["llama"]
    model, inputs = architecture.build(torch.float32).eval(), architecture.make_inputs()
    assert list(NamedCall(model, {"use_cache": True})(**inputs)) == ["logits"]
