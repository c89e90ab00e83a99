"""Prepare a model for an export: load it, put it into eval mode, and call it with plain tensors alone."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_trainweights.errors import ConfigError, UnsupportedError
from hf_trainweights.formats.coded import Coded
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.models.host.models import CACHE_ARGUMENTS, cache_argument, has_adapters
from hf_trainweights.models.loading.saved_models import load_saved
from hf_trainweights.models.saving.saved_tensors import whole_state_dict
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# The sizes of inputs that are made up.
_BATCH, _LENGTH = 2, 8

# The inputs that a caller passes: one tensor, several arguments in order, or several by name.
ExampleInputs = Tensor | Sequence[Any] | Mapping[str, Any]


def model_of(source: nn.Module | str | os.PathLike[str], dtype: torch.dtype | str = "auto") -> Any:
    """Return a quantized model as it is, or load it from a directory, by default in the dtypes that it was saved in.

    ConfigError: no parameter of the model is quantized.
    """
    model = source if isinstance(source, nn.Module) else load_saved(source, dtype=dtype)
    if not any(isinstance(parameter, QuantizedTensor) for parameter in model.parameters()):
        raise ConfigError("model", "quantized weights", "none", "Quantize the model first.")
    return model


def tensors_to_write(model: PreTrainedModel) -> dict[str, Any]:
    """Return all tensors of a model by name. A tied weight is there once, a coded weight is an int8 weight.

    UnsupportedError: the model has adapters, or is no model of Transformers.
    """
    if has_adapters(model):
        raise UnsupportedError("model", "a model by itself", "one with adapters", "Save them, then delete_adapter.")
    if not isinstance(model, PreTrainedModel):
        next_step = "For other modules there are export_onnx, export_torchscript and export_program."
        raise UnsupportedError("model", "a model of Transformers", type(model).__name__, next_step)
    return {name: _as_int8(tensor) for name, tensor in whole_state_dict(model).items()}


def _as_int8(value: Any) -> Any:
    if not isinstance(value, QuantizedTensor) or not isinstance(value.format, Coded):
        return value
    return QuantizedTensor.from_held(value.held, Int8(), value.stored_shape, value.dtype, value.transposed)


@contextlib.contextmanager
def in_eval_mode(model: Any) -> Iterator[Any]:
    """Put a model into eval mode, and put each module back into its own mode when the context ends.

    The modules' `eval` and `train` are called, because some do more than set a flag, such as merge an adapter.
    """
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield model
    finally:
        # A module comes before its submodules, and its `train` changes their modes too.
        for module, training in modes.items():
            if module.training != training:
                module.train(training)


@dataclass(frozen=True)
class Inputs:
    """The arguments of a model's `forward`."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, example_inputs: ExampleInputs | None) -> Inputs:
        """Return example inputs as arguments, or make some for a model of Transformers; ConfigError: neither works."""
        if example_inputs is None:
            example_inputs = _made_up(model)
        if not isinstance(example_inputs, Tensor | Sequence | Mapping) or isinstance(example_inputs, str | bytes):
            kind, next_step = type(example_inputs).__name__, "Pass what model(*inputs) or model(**inputs) takes."
            raise ConfigError("example_inputs", "a tensor, a tuple or a dict of arguments", kind, next_step)
        if isinstance(example_inputs, Mapping):
            return cls(kwargs=_without_cache(model, example_inputs))
        inputs = cls((example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs))
        # Models of Transformers take all arguments by name.
        return cls.of(model, inputs.by_name(model)) if isinstance(model, PreTrainedModel) else inputs

    def by_name(self, model: nn.Module) -> dict[str, Any]:
        """Return all arguments by the names that the model's `forward` gives them."""
        names = list(inspect.signature(model.forward).parameters)
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}

    def split(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors among the named arguments, and the other named arguments."""
        tensors = {name: value for name, value in self.kwargs.items() if isinstance(value, Tensor)}
        return tensors, {name: value for name, value in self.kwargs.items() if name not in tensors}


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
    """Tell a decoder to return no cache, unless the inputs ask for one: its tensors would be outputs of the file."""
    has_cache, asks = bool(cache_argument(model)), not inputs.keys().isdisjoint({"use_cache", *CACHE_ARGUMENTS})
    return {**inputs, "use_cache": False} if has_cache and not asks else dict(inputs)


class NamedCall(nn.Module):
    """A model of Transformers that takes tensors by name and returns a dict of tensors.

    The options are the arguments that are no tensors. They are the same at every call.
    """

    def __init__(self, model: PreTrainedModel, options: Mapping[str, Any]):
        super().__init__()
        self.model, self._options = model, dict(options)

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Call the model, and leave out outputs that are no tensors, such as a cache."""
        return dict(_named_tensors(self.model(**inputs, **self._options)))


def _named_tensors(outputs: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model's outputs. The name of a nested one, as SigLIP has, is `<outer>.<inner>`."""
    for name, value in outputs.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping):
            yield from _named_tensors(value, f"{prefix}{name}.")
        elif isinstance(value, tuple):
            yield from _named_tensors({str(index): item for index, item in enumerate(value)}, f"{prefix}{name}.")


class OrderedCall(nn.Module):
    """A model of Transformers that takes tensors in the order of `names` and returns a tuple, as C++ calls it."""

    def __init__(self, model: PreTrainedModel, names: Sequence[str], options: Mapping[str, Any]):
        super().__init__()
        self._call, self._names = NamedCall(model, options), tuple(names)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Call the model."""
        return tuple(self._call(**dict(zip(self._names, inputs, strict=True))).values())
