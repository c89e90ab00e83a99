"""`lowered(model, target)`: hold a quantized model as plain modules, plain tensors and plain ops of a target.

A target is a kind of file to export to (`targets.py`). For the time of an export the model is lowered. Every exporter
of PyTorch can trace such a model as it is. So no exporter needs to know quantized tensors, and no graph has to be
searched for patterns afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.exports.targets import PlainWeight, Target, Use
from hf_trainweights.formats.column_scale import COLUMN_SCALE, ColumnScaled
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor


@contextlib.contextmanager
def lowered(model: nn.Module, target: Target) -> Iterator[nn.Module]:
    """Replace a model's quantized weights by plain buffers, in place, and restore the weights when the context ends.

    A weight `<module>.<name>` becomes the buffers `<module>._<name>_qdata`, `_scale` and others that the target needs.
    A float model stays as it is.
    """
    tensors = _plain_tensors(model, target)
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if weights := _quantized_weights(module):
                stack.enter_context(_lowered_module(module, weights, tensors, target))
        yield model


def _plain_tensors(model: nn.Module, target: Target) -> dict[QuantizedTensor, dict[str, Tensor]]:
    """Return the plain tensors that replace each quantized weight; a tied weight has the same ones in all modules."""
    uses: dict[QuantizedTensor, set[Use]] = {}
    names: dict[QuantizedTensor, str] = {}
    for module_name, module in model.named_modules():
        for name, weight in _quantized_weights(module):
            uses.setdefault(weight, set()).add(_use_of(module, name, weight))
            names.setdefault(weight, f"{module_name}.{name}".removeprefix("."))
    tensors = {}
    for weight, name in names.items():
        _check(name, weight)
        column_scale = {key: tensor for key, tensor in weight.tensors.items() if key == COLUMN_SCALE}
        tensors[weight] = target.buffers(weight, uses[weight]) | column_scale
    return tensors


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
    if weight.format.unpack({key: tensor.to("meta") for key, tensor in weight.tensors.items()}) is None:
        raise UnsupportedError(
            name,
            "a format that tells by which plain ops it is unpacked (Format.unpack)",
            str(weight.format),
            "Quantize the model again in another, or leave this weight in float (modules_to_not_convert).",
        )


@contextlib.contextmanager
def _lowered_module(
    module: nn.Module,
    weights: list[tuple[str, QuantizedTensor]],
    tensors: Mapping[QuantizedTensor, dict[str, Tensor]],
    target: Target,
) -> Iterator[None]:
    parameters, buffers, attributes = dict(module._parameters), dict(module._buffers), dict(vars(module))
    try:
        for name, weight in weights:
            del module._parameters[name]
            for key, tensor in tensors[weight].items():
                module.register_buffer(f"_{name}_{key}", tensor)
            vars(module)[name] = LoweredWeight(module, name, tuple(tensors[weight]), weight, target)
        # Otherwise TorchScript takes them for tensors, because nn.Linear declares its weight as one.
        vars(module)["__jit_ignored_attributes__"] = [name for name, _ in weights]
        # A module with quantized weights refuses TorchScript by this method. Now its tensors are plain.
        vars(module).pop("__prepare_scriptable__", None)
        yield
    finally:
        vars(module).clear()
        vars(module).update(attributes)
        # Refill the same dicts, because others may refer to them, and in the same order.
        module._parameters.clear()
        module._parameters.update(parameters)
        module._buffers.clear()
        module._buffers.update(buffers)


class LoweredWeight:
    """A weight of a lowered module: `F.linear` and `F.embedding` use the target's ops, all else dequantizes it.

    Its tensors are the module's buffers `_<name>_<key>`. They are read at each use, because exporters replace them.
    """

    def __init__(self, module: nn.Module, name: str, keys: tuple[str, ...], weight: QuantizedTensor, target: Target):
        self._module, self._name, self._keys, self._target = module, name, keys, target
        form = weight.format
        self._format, self._transposed = form.inner if isinstance(form, ColumnScaled) else form, weight.transposed
        self._stored_shape = tuple(weight.stored_shape)
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device

    @property
    def plain(self) -> PlainWeight:
        """The weight, with the plain tensors that its module holds now."""
        buffers = {key: getattr(self._module, f"_{self._name}_{key}") for key in self._keys}
        column_scale = buffers.pop(COLUMN_SCALE, None)
        return PlainWeight(self._format, self.dtype, self._stored_shape, buffers, column_scale)

    def dequantize(self) -> Tensor:
        """Return the float weight in the shape that the module expects."""
        plain = self.plain
        weight = plain.scale_columns(self._target.dequantize(plain)).to(self.dtype)
        return weight.transpose(-1, -2) if self._transposed else weight

    def look_up(self, indices: Tensor) -> Tensor:
        """Return rows of a weight `[N, K]`."""
        plain = self.plain
        return plain.scale_columns(self._target.look_up(plain, indices)).to(self.dtype)

    def __getattr__(self, name: str) -> Any:
        # Python and PyTorch look for hooks with names such as __torch_script__. This class has none.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dequantize(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.dequantize()[index]

    def __len__(self) -> int:
        return self.shape[0]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        del types
        first, second, third, *_ = (*args, None, None, None)
        if isinstance(second, cls) and second._is_matrix:
            if func is F.linear:
                return second._target.linear(second.plain, first, kwargs.get("bias", third))
            # A lookup with max_norm changes the weight.
            if func is F.embedding and kwargs.get("max_norm") is None:
                return second.look_up(first)
        return func(*map(_dequantized, args), **{name: _dequantized(value) for name, value in kwargs.items()})

    @property
    def _is_matrix(self) -> bool:
        return len(self.shape) == 2 and not self._transposed


def _dequantized(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_dequantized, value))
    return value.dequantize() if isinstance(value, LoweredWeight) else value
