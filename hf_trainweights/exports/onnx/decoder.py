"""Trace a decoder to one ONNX graph that takes a past, name its inputs and outputs, and compare it with the model.

The past is the keys and values of earlier tokens. It may be empty, so one graph reads a prompt and continues it. The
names are the ones that optimum, onnxruntime-genai and transformers.js look for.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.exports.lowering import lowered
from hf_trainweights.exports.onnx.graph import NEXT_STEP, name_dimensions, trace
from hf_trainweights.exports.onnx.model import OnnxModel, VerificationReport, compare, open_valid
from hf_trainweights.exports.refusals import tracer_errors
from hf_trainweights.exports.sources import Inputs
from hf_trainweights.exports.targets import Target
from hf_trainweights.models.host.models import cache_argument, is_stateful

FILE = "model.onnx"
"""The one file of a decoder."""

# The names that Transformers' exporter gives to the keys and values of a layer.
_NAMES_OF_TRANSFORMERS = re.compile(r"(?:(?:in|out)put\.)?(?:past_key_values|cache)\.layers\.(\d+)\.(key|value)s")
_PAST, _PRESENT = "past_key_values", "present"

# The sizes of the traced call. No size may be 0 or 1, because the exporter takes these for constants.
_BATCH, _PAST_LENGTH, _LENGTH = 2, 5, 3

# The names of the free dimensions of each input.
_DIMENSIONS = {
    "input_ids": {0: "batch_size", 1: "sequence_length"},
    "attention_mask": {0: "batch_size", 1: "total_sequence_length"},
    "position_ids": {0: "batch_size", 1: "sequence_length"},
    _PAST: {0: "batch_size", 2: "past_sequence_length"},
}


def _check(model: nn.Module) -> PreTrainedModel:
    """Return the model after a check that it can be exported as a decoder with past; else UnsupportedError."""
    next_step = "Leave task out: then the file holds one call of forward, without a past."
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        description = type(model).__name__
    elif model.config.is_encoder_decoder:
        description = f"{type(model).__name__}, an encoder with a decoder"
        next_step = 'Use task="text2text-generation", or "automatic-speech-recognition".'
    elif "input_ids" not in _arguments(model) or not cache_argument(model):
        description = f"{type(model).__name__}, which takes {', '.join(sorted(_arguments(model)))}"
    elif is_stateful(model):
        description = f"{type(model).__name__}, whose cache holds a state"
    else:
        return model
    expected = "a decoder of Transformers that takes input_ids and a cache of keys and values"
    raise UnsupportedError("task='text-generation'", expected, description, next_step)


def trace_decoder(model: nn.Module, target: Target, opset: int) -> dict[str, Any]:
    """Trace a quantized decoder with past, and return its graph by file name; UnsupportedError: it is no decoder."""
    model = _check(model)
    call, argument = _call(model, _mask(_BATCH, _PAST_LENGTH + _LENGTH)), cache_argument(model)
    past = {name: value[:, :_PAST_LENGTH] for name, value in call.items()}
    with torch.no_grad(), tracer_errors(model, "torch.onnx", NEXT_STEP):
        cache = model(**past, **{argument: DynamicCache()}, use_cache=True)[argument]
    step = {name: value if name == "attention_mask" else value[:, _PAST_LENGTH:] for name, value in call.items()}
    inputs = Inputs(kwargs={**step, argument: cache, "use_cache": True})
    graph = trace(model, inputs, target, opset)
    _name(graph, model)
    return {FILE: graph}


def verify_decoder(directory: Path, model: PreTrainedModel) -> VerificationReport:
    """Run a prompt and one further token through the file and through its model, and compare the logits."""
    session = open_valid(directory / FILE)
    mask = _mask(_BATCH + 1, _LENGTH + 1)
    call, cache = _call(model, mask), {cache_argument(model): DynamicCache()}
    past: dict[str, Any] = _empty_past(session, len(mask))
    differences = []
    for name, start, end in (("logits of a prompt", 0, _LENGTH), ("logits of a step", _LENGTH, _LENGTH + 1)):
        inputs = {key: value[:, 0 if key == "attention_mask" else start : end] for key, value in call.items()}
        # Lowered, the model computes with dequantized weights, as the file does. Kernels for codes round otherwise.
        with torch.no_grad(), lowered(model, Target()):
            wanted = model(**inputs, **cache, use_cache=True).logits
        outputs = session.predict({**inputs, **past})
        past = {key.replace(_PRESENT, _PAST): value for key, value in outputs.items() if key != "logits"}
        # Logits of padding are left out, because no program reads them.
        read = mask[:, start:end].bool()
        differences.append(compare(name, outputs["logits"][read.cpu().numpy()], wanted[read]))
    return VerificationReport(tuple(differences))


def _arguments(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _mask(batch: int, length: int) -> Tensor:
    """Return the attention mask of a batch whose first row is padded at its left."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, 0] = 0
    return mask


def _call(model: PreTrainedModel, mask: Tensor) -> dict[str, Tensor]:
    """Return arguments that the model's `forward` takes for one call without past."""
    ids = torch.arange(mask.numel()).view(mask.shape) % model.config.get_text_config().vocab_size
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    return {name: tensor.to(model.device) for name, tensor in inputs.items() if name in _arguments(model)}


def _name(graph: Any, model: PreTrainedModel) -> None:
    """Rename inputs, outputs and free dimensions in place to the names that readers look for."""
    for values, name in ((graph.graph.inputs, _PAST), (graph.graph.outputs, _PRESENT)):
        for value in values:
            value.name = _NAMES_OF_TRANSFORMERS.sub(rf"{name}.\1.\2", value.name)
    inputs, outputs = ({value.name for value in values} for values in (graph.graph.inputs, graph.graph.outputs))
    presents = {f"{_PRESENT}.{layer}.{kind}" for layer in range(_layers(model)) for kind in ("key", "value")}
    pasts = {name.replace(_PRESENT, _PAST) for name in presents}
    if not ("input_ids" in inputs and inputs - _DIMENSIONS.keys() == pasts and outputs == presents | {"logits"}):
        expected = f"a cache of keys and values for each of {_layers(model)} layers, and logits"
        signature = f"{', '.join(sorted(inputs))} -> {', '.join(sorted(outputs))}"
        next_step = "Leave task out: then the file holds one call of forward, without a past."
        raise UnsupportedError(type(model).__name__, expected, signature, next_step)
    name_dimensions(graph, {name: _DIMENSIONS[name if name in _DIMENSIONS else _PAST] for name in inputs})


def _layers(model: PreTrainedModel) -> int:
    return model.config.get_text_config().num_hidden_layers


def _empty_past(session: OnnxModel, batch: int) -> dict[str, Tensor]:
    """Return a past with zero tokens. The file leaves only batch and length free in its shapes."""
    free = {0: batch, 2: 0}
    return {
        name: torch.zeros([size if isinstance(size, int) else free[axis] for axis, size in enumerate(shape)])
        for name, shape in session.input_shapes.items()
        if name.startswith(_PAST)
    }
