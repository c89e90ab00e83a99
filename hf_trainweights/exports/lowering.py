"""`lowered(model, target)`: a quantized model that consists of plain modules, plain tensors and a target's plain ops.

Every exporter of PyTorch can trace such a model as it is, so none needs to know a quantized tensor and no graph is
searched for patterns afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from hf_trainweights.errors import ConfigError, UnsupportedError
from hf_trainweights.exports.lowered_weight import LoweredWeight
from hf_trainweights.exports.targets.base import Target, Use
from hf_trainweights.formats.column_scale import COLUMN_SCALE
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor


@contextlib.contextmanager
def lowered(model: nn.Module, target: Target) -> Iterator[nn.Module]:
    """Hold a model's quantized weights as plain buffers within the context; in place, and as before afterwards.

    A weight `<module>.<name>` becomes the buffers `<module>._<name>_qdata`, `_scale` and what else the target needs.
    """
    weights = [parameter for parameter in model.parameters() if isinstance(parameter, QuantizedTensor)]
    if not weights:
        raise ConfigError("model", "quantized weights", "none", "Quantize the model first.")
    with contextlib.ExitStack() as stack:
        for module, places in _places(model, target):
            stack.enter_context(_lowered_module(module, places, target))
        yield model


def lowered_if_quantized(model: nn.Module, target: Target) -> contextlib.AbstractContextManager[nn.Module]:
    """Return `lowered(model, target)`, which leaves a float model as it is instead of refusing it."""
    is_quantized = any(isinstance(parameter, QuantizedTensor) for parameter in model.parameters())
    return lowered(model, target) if is_quantized else contextlib.nullcontext(model)


class _Place(NamedTuple):
    """A quantized weight in a module, and the plain tensors that stand for it."""

    name: str
    weight: QuantizedTensor
    tensors: dict[str, Tensor]


def _places(model: nn.Module, target: Target) -> list[tuple[nn.Module, list[_Place]]]:
    """Return each module that owns quantized weights; the places of a tied weight share their tensors."""
    uses: dict[QuantizedTensor, set[Use]] = {}
    names: dict[QuantizedTensor, str] = {}
    for module_name, module in model.named_modules():
        for name, weight in _quantized_weights(module):
            uses.setdefault(weight, set()).add(_use_of(module, name, weight))
            names.setdefault(weight, f"{module_name}.{name}".removeprefix("."))
    tensors = {}
    for weight, name in names.items():
        _check(name, weight)
        columns = {name: tensor for name, tensor in weight.tensors.items() if name == COLUMN_SCALE}
        tensors[weight] = target.buffers(weight, uses[weight]) | columns
    found = ((module, _quantized_weights(module)) for module in model.modules())
    return [(module, [_Place(name, w, tensors[w]) for name, w in weights]) for module, weights in found if weights]


def _quantized_weights(module: nn.Module) -> list[tuple[str, QuantizedTensor]]:
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return [(name, weight) for name, weight in parameters if isinstance(weight, QuantizedTensor)]


def _use_of(module: nn.Module, name: str, weight: QuantizedTensor) -> Use:
    if name != "weight" or weight.transposed:
        return Use.OTHER
    if isinstance(module, nn.Linear):
        return Use.LINEAR
    return Use.TABLE if isinstance(module, nn.Embedding) else Use.OTHER


def _check(name: str, weight: QuantizedTensor) -> None:
    if weight.format.unpack({name: tensor.to("meta") for name, tensor in weight.tensors.items()}) is None:
        raise UnsupportedError(
            name,
            "a format that tells by which plain ops it is unpacked (Format.unpack)",
            str(weight.format),
            "Quantize the model again in another, or leave this weight in float (modules_to_not_convert).",
        )


@contextlib.contextmanager
def _lowered_module(module: nn.Module, places: list[_Place], target: Target) -> Iterator[None]:
    parameters, buffers, attributes = dict(module._parameters), dict(module._buffers), dict(vars(module))
    try:
        for name, weight, tensors in places:
            del module._parameters[name]
            for key, tensor in tensors.items():
                module.register_buffer(f"_{name}_{key}", tensor)
            vars(module)[name] = LoweredWeight(module, name, tuple(tensors), weight, target)
        # TorchScript would take them for tensors, as nn.Linear declares its weight.
        vars(module)["__jit_ignored_attributes__"] = [place.name for place in places]
        # By it a module refuses TorchScript as long as its weights are quantized.
        vars(module).pop("__prepare_scriptable__", None)
        yield
    finally:
        vars(module).clear()
        vars(module).update(attributes)
        # In the same dicts, which others may hold, and in the same order.
        module._parameters.clear()
        module._parameters.update(parameters)
        module._buffers.clear()
        module._buffers.update(buffers)
