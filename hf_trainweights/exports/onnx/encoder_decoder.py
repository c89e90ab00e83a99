"""Trace an encoder-decoder to three ONNX graphs: the encoder, the decoder's first call, and its calls with a past.

Files and names are the ones that optimum and transformers.js look for. The decoder's first call computes the keys and
values of the encoder's output, and later calls take these from the past.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.exports.lowering import lowered
from hf_trainweights.exports.onnx.graph import Part, name_dimensions, trace
from hf_trainweights.exports.onnx.model import VerificationReport, compare, open_valid
from hf_trainweights.exports.sources import Inputs
from hf_trainweights.exports.targets import Target
from hf_trainweights.models.host.models import cache_argument

ENCODER, DECODER, DECODER_WITH_PAST = "encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"
_PAST, _PRESENT, _HIDDEN, _MASK = "past_key_values", "present", "encoder_hidden_states", "encoder_attention_mask"

# Sizes of the traced calls. The exporter takes 0 and 1 for constants, and equal sizes, also of the model, for one size.
_BATCH, _LENGTH, _STEP = 2, 7, 3

# The names of the free dimensions of each input.
_SOURCE: dict[int, str | int] = {0: "batch_size", 1: "encoder_sequence_length"}
_DIMENSIONS: dict[str, dict[int, str | int]] = {
    "attention_mask": _SOURCE,
    _MASK: _SOURCE,
    "decoder": {0: "batch_size", 2: "past_decoder_sequence_length"},
    "encoder": {0: "batch_size", 2: "encoder_sequence_length"},
}


class _Encoder(Part):
    """The encoder. It returns only its last hidden states."""

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Encode a text or sounds."""
        return {"last_hidden_state": self.model.get_encoder()(**inputs).last_hidden_state}


class _Decoder(Part):
    """The decoder and its head. The past is a dict of tensors."""

    def forward(
        self,
        input_ids: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Return logits, the decoder's keys and values, and without a past also those of the encoder's output."""
        past = past_key_values or {}
        own, cross = DynamicCache(), DynamicCache()
        for layer in range(len(past) // 4):
            own.update(past[f"{layer}.decoder.key"], past[f"{layer}.decoder.value"], layer)
            cross.update(past[f"{layer}.encoder.key"], past[f"{layer}.encoder.value"], layer)
        mask = {} if encoder_attention_mask is None else {"attention_mask": encoder_attention_mask}
        cache = EncoderDecoderCache(own, cross)
        states: Any = (encoder_hidden_states,)
        call = {"encoder_outputs": states, "decoder_input_ids": input_ids, cache_argument(self.model): cache, **mask}
        outputs = {"logits": self.model(**call, use_cache=True).logits}
        # optimum expects the outputs in this order: layer by layer.
        layers: Any = zip(own.layers, cross.layers, strict=True)
        for layer, pair in enumerate(layers):
            for source, states in zip(("decoder", "encoder")[: 1 if past else 2], pair, strict=False):
                prefix = f"{_PRESENT}.{layer}.{source}"
                outputs |= {f"{prefix}.key": states.keys, f"{prefix}.value": states.values}
        return outputs


def _check(model: nn.Module, task: str) -> PreTrainedModel:
    """Return the model after a check that it can be exported as an encoder and a decoder; else UnsupportedError."""
    main_input = "input_ids" if task == "text2text-generation" else "input_features"
    if isinstance(model, PreTrainedModel) and model.can_generate() and model.config.is_encoder_decoder:
        if model.main_input_name == main_input:
            return model
        description = f"{type(model).__name__}, which takes {model.main_input_name}"
    else:
        description = type(model).__name__
    expected = f"an encoder-decoder of Transformers that takes {main_input}"
    next_step = "Use the task of the model, or leave task out: then the file holds one call of forward, without a past."
    raise UnsupportedError(f"task={task!r}", expected, description, next_step)


def trace_encoder_decoder(model: nn.Module, target: Target, opset: int, task: str) -> dict[str, Any]:
    """Trace an encoder-decoder in eval mode with free batch and lengths, and return the graphs by file name."""
    model = _check(model, task)
    source = _source(model, _BATCH)
    with torch.no_grad(), lowered(model, Target()):
        call = _first_call(model, source, _BATCH)
        past = _past(_Decoder(model)(**call))
    graphs = {}
    for name, module, inputs in (
        (ENCODER, _Encoder(model), source),
        (DECODER, _Decoder(model), call),
        (DECODER_WITH_PAST, _Decoder(model), {**call, _PAST: past}),
    ):
        graph = trace(module, Inputs(kwargs=inputs), target, opset)
        # A call with a past does not use the encoder's output, so it is no input of that graph.
        graph.graph.inputs[:] = [value for value in graph.graph.inputs if value.name != _HIDDEN or value.uses()]
        width = call[_HIDDEN].shape[-1]
        name_dimensions(graph, {value.name: _dimensions(value.name, name, width) for value in graph.graph.inputs})
        graphs[name] = graph
    return graphs


def verify_encoder_decoder(directory: Path, model: PreTrainedModel) -> VerificationReport:
    """Run the encoder, a first call and a call with a past through the files and through the model, and compare."""
    sessions = {name: open_valid(directory / name) for name in (ENCODER, DECODER, DECODER_WITH_PAST)}
    source, decoder = _source(model, _BATCH + 1), _Decoder(model)
    with torch.no_grad(), lowered(model, Target()):
        call = _first_call(model, source, _BATCH + 1)
        first = decoder(**call)
        step = {**call, "input_ids": call["input_ids"][:, :1]}
        second = decoder(**step, past_key_values=_past(first))
    hidden_states = sessions[ENCODER].predict(source)["last_hidden_state"]
    reports = [compare("hidden states", hidden_states, call[_HIDDEN])]
    outputs = sessions[DECODER].predict(call)
    reports.append(compare("logits of a first call", outputs["logits"], first["logits"]))
    past = {name.replace(_PRESENT, _PAST): value for name, value in outputs.items() if name != "logits"}
    inputs = {name: ({**step, **past})[name] for name in sessions[DECODER_WITH_PAST].input_names}
    outputs = sessions[DECODER_WITH_PAST].predict(inputs)
    reports.append(compare("logits of a step", outputs["logits"], second["logits"]))
    return VerificationReport(tuple(reports))


def _source(model: PreTrainedModel, batch: int) -> dict[str, Tensor]:
    """Return arguments of the encoder: texts, of which the last is padded, or sounds of the one length it accepts."""
    if model.main_input_name == "input_features":
        size = (batch, model.config.num_mel_bins, 2 * model.config.max_source_positions)
        return {"input_features": torch.linspace(-1, 1, torch.Size(size).numel()).view(size).to(model.device)}
    ids = torch.arange(batch * _LENGTH).view(batch, _LENGTH) % model.config.vocab_size
    mask = torch.ones_like(ids)
    mask[-1, -2:] = 0
    return {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}


def _first_call(model: PreTrainedModel, source: dict[str, Tensor], batch: int) -> dict[str, Tensor]:
    ids = torch.arange(batch * _STEP, device=model.device).view(batch, _STEP) % model.config.vocab_size
    call = {"input_ids": ids, _HIDDEN: _Encoder(model)(**source)["last_hidden_state"]}
    return call | ({_MASK: source["attention_mask"]} if "attention_mask" in source else {})


def _past(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(f"{_PRESENT}."): value for name, value in outputs.items() if name != "logits"}


def _dimensions(name: str, file: str, width: int) -> dict[int, str | int]:
    if name == _HIDDEN:
        return {**_SOURCE, 2: width}
    if name == "input_ids":
        return _SOURCE if file == ENCODER else {0: "batch_size", 1: "decoder_sequence_length"}
    if name == "input_features":
        return {0: "batch_size"}
    return _DIMENSIONS[name.split(".")[2] if name.startswith(_PAST) else name]
