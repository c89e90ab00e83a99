"""The inputs that an exporter runs a model with."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_trainweights.errors import ConfigError

_BATCH, _LENGTH = 2, 8

# Inputs as a caller may give them: one tensor, several in order, or several by name.
ExampleInputs = Tensor | Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class Inputs:
    """The arguments of a model's `forward`."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, example_inputs: ExampleInputs | None) -> Inputs:
        """Return what is given, or inputs that fit a model of Transformers; ConfigError: none can be made up."""
        if example_inputs is None:
            example_inputs = _made_up(model)
        if isinstance(example_inputs, Mapping):
            return cls(kwargs=_without_cache(model, example_inputs))
        inputs = cls((example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs))
        # Models of Transformers are called by name.
        return cls.of(model, inputs.by_name(model)) if isinstance(model, PreTrainedModel) else inputs

    def by_name(self, model: nn.Module) -> dict[str, Any]:
        """Return all arguments by the names that the model's `forward` gives them."""
        names = list(inspect.signature(model.forward).parameters)
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}


def _made_up(model: nn.Module) -> dict[str, Tensor]:
    if isinstance(model, PreTrainedModel):
        if model.main_input_name == "input_ids":
            return _text(model)
        if model.main_input_name == "pixel_values" and hasattr(model.config, "image_size"):
            return {"pixel_values": _image(model)}
    name = type(model).__name__
    raise ConfigError("example_inputs", f"inputs for a {name}", "None", "Pass a dict of its arguments, or a tuple.")


def _text(model: PreTrainedModel) -> dict[str, Tensor]:
    taken = inspect.signature(model.forward).parameters
    ids = torch.arange(_BATCH * _LENGTH).view(_BATCH, _LENGTH) % model.config.get_text_config().vocab_size
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids[:, :3].clone()}
    return {name: tensor.to(model.device) for name, tensor in inputs.items() if name in taken}


def _image(model: PreTrainedModel) -> Tensor:
    size = model.config.image_size
    height, width = size if isinstance(size, Sequence) else (size, size)
    shape = (_BATCH, getattr(model.config, "num_channels", 3), height, width)
    values = torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)
    return values.to(model.device, model.dtype)


def _without_cache(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs that ask a decoder for no cache, unless they bring one: its parts would be outputs of the file."""
    has_cache = "past_key_values" in inspect.signature(model.forward).parameters
    asks = "use_cache" in inputs or "past_key_values" in inputs
    return {**inputs, "use_cache": False} if has_cache and not asks else dict(inputs)
