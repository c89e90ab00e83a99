"""PEFT's layers over quantized weights: what initialises, merges or unmerges an adapter gets the weight in float.

PEFT chooses its code for a quantized layer from a fixed list of methods, by layer class. This package quantizes the
weight of a plain `nn.Linear`, so PEFT takes its layers for float weights, whose merging writes to the weight in place.
So the methods of PEFT that do that are wrapped: within them the weight is a float one, and if they have changed it, it
is quantized again. PyTorch tells when a PEFT layer takes in a module, so PEFT is neither imported here nor changed
before it meets a quantized weight. Over float weights a wrapped method is PEFT's own call and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.tensor.modules import as_parameter
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor
from hf_trainweights.tensor.requantizing import in_float, rounding_said_once

# Methods of a PEFT layer that may write to the weight below it, or copy that into parameters of their own.
_WRITING = ("update_layer", "merge", "unmerge")
# Methods of PEFT's models that call those of many layers.
_CALLING_MANY = ("inject_adapter", "merge_adapter", "unmerge_adapter", "merge_and_unload")
# Methods of diffusers that do so, and their classes: of pipelines, and of models.
_FUSING = ("fuse_lora", "unfuse_lora")
_FUSING_CLASSES = (("diffusers.loaders.lora_base", "LoraBaseMixin"), ("diffusers.loaders.peft", "PeftAdapterMixin"))

# The name under which a class of PEFT takes in what it wraps, and that class's base and where that is.
_PLACES = {
    "model": ("peft.tuners.tuners_utils", "BaseTuner"),
    "base_layer": ("peft.tuners.tuners_utils", "BaseTunerLayer"),
    "original_module": ("peft.utils.other", "AuxiliaryTrainingWrapper"),
}

_Method = Callable[..., Any]


def meet_adapters(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Wrap methods of a PEFT class whose instance takes in a module with quantized weights.

    PyTorch calls this whenever a module gets a submodule.
    """
    home, base = _PLACES.get(name, ("", ""))
    cls = getattr(sys.modules.get(home), base, None)
    if cls is None or not isinstance(module, cls) or submodule is None:
        return
    if not any(isinstance(parameter, QuantizedTensor) for parameter in submodule.parameters()):
        return
    if name == "model":
        _wrap(type(module), _CALLING_MANY, _say_rounding_once)
        for home, base in _FUSING_CLASSES:
            _wrap(getattr(sys.modules.get(home), base, object), _FUSING, _say_rounding_once)
    elif name == "base_layer":
        _wrap(type(module), _WRITING, _with_float_weight)
        _wrap(type(module), ("get_base_weight",), _dequantized)
        _wrap(type(module), ("_activate_lora",), _over_an_alias)
    else:
        _wrap(type(module), ("update",), _with_float_copy)


def _wrap(cls: type, names: tuple[str, ...], wrapper: Callable[[_Method], _Method]) -> None:
    """Wrap methods once wherever a class or its bases define them."""
    for base in cls.__mro__:
        for name in set(names) & vars(base).keys():
            method = vars(base)[name]
            if not hasattr(method, "_wrapped_for_quantized_weights"):
                wrapped = _over_quantized_weights(method, wrapper(method))
                wrapped._wrapped_for_quantized_weights = True  # type: ignore[attr-defined]
                setattr(base, name, wrapped)


def _over_quantized_weights(method: _Method, wrapped: _Method) -> _Method:
    """Return the method that calls a wrapped one where any weight below is quantized, and else PEFT's own."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_module = isinstance(self, nn.Module)  # not so a pipeline of diffusers, whose models may be quantized
        is_float = is_module and not any(isinstance(parameter, QuantizedTensor) for parameter in self.parameters())
        return (method if is_float else wrapped)(self, *args, **kwargs)

    return call


def _say_rounding_once(method: _Method) -> _Method:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with rounding_said_once():
            return method(self, *args, **kwargs)

    return call


def _with_float_weight(method: _Method) -> _Method:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        base_layer = self.get_base_layer()
        names = [] if _draws_adapter_alone(method, kwargs) else quantized_names(base_layer)
        # A wrapper of one expert weight leaves the others alone.
        names = [name for name in names if name == getattr(self, "parameter_name", name)]
        if not names:
            return method(self, *args, **kwargs)
        _refuse_loftq(method, kwargs)
        merged = list(self.merged_adapters)
        try:
            with in_float(base_layer, names):
                return method(self, *args, **kwargs)
        except BaseException:
            # The weight is as before, so what is merged into it is as well.
            self.merged_adapters[:] = merged
            raise

    return call


def _over_an_alias(method: _Method) -> _Method:
    """Let a wrapper of one parameter parametrize an object of its own that stands for the same weight.

    PyTorch swaps the tensor that is parametrized if it is of a class of its own, and refuses to where an autograd graph
    of an earlier forward still holds it.
    """

    @contextlib.contextmanager
    def call(self: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        parameters, name = self.get_base_layer()._parameters, self.parameter_name
        weight = parameters.get(name)
        if isinstance(weight, QuantizedTensor):
            parameters[name] = as_parameter(weight.map(lambda stored: stored))
        try:
            with method(self, *args, **kwargs):
                yield
        finally:
            if isinstance(weight, QuantizedTensor):
                parameters[name] = weight

    return call


def _draws_adapter_alone(method: _Method, options: dict[str, Any]) -> bool:
    """Return whether LoRA is about to initialise an adapter without regard to the weight, as it does by default.

    To dequantize every weight for that would take longer than all the rest of `get_peft_model`.
    """
    truncates = getattr(options.get("config"), "kasa_config", None) is not None
    return method.__name__ == "update_layer" and isinstance(_initialisation(options), bool) and not truncates


def _initialisation(options: dict[str, Any]) -> object:
    """Return how an adapter of LoRA is to be initialised, from the arguments of `update_layer`."""
    return getattr(options.get("config"), "init_lora_weights", options.get("init_lora_weights"))


def _refuse_loftq(method: _Method, options: dict[str, Any]) -> None:
    if method.__name__ == "update_layer" and _initialisation(options) == "loftq":
        raise UnsupportedError(
            'init_lora_weights="loftq"',
            "float weights: LoftQ makes up for what quantizing loses",
            "weights that are quantized, of which it would see no more than what is left",
            'Leave it out, or take one that starts from the quantized weight: "pissa", "olora" or "eva".',
        )


def adapter_prefixes(module: nn.Module) -> tuple[str, ...]:
    """Return what the names of those parameters of a module begin with that PEFT has put there to be trained."""
    found: list[str] = []
    for name, each in module.named_modules():
        prompts = ("prompt_encoder",) if hasattr(each, "peft_config") else ()
        layers: tuple[str, ...] = (*getattr(each, "adapter_layer_names", ()), *prompts)
        found += [f"{name}.{layer}.".removeprefix(".") for layer in layers]
    return tuple(found)


def quantized_names(module: nn.Module) -> list[str]:
    """Return the names of a module's own weights that are quantized and have values."""
    own = module.named_parameters(recurse=False)
    return [name for name, weight in own if isinstance(weight, QuantizedTensor) and not weight.is_meta]


def _dequantized(method: _Method) -> _Method:
    def call(self: Any) -> Any:
        weight: Tensor = method(self)
        return weight.dequantize() if isinstance(weight, QuantizedTensor) else weight

    return call


def _with_float_copy(method: _Method) -> _Method:
    """Let a wrapper copy a layer that is to be trained in full as a float one."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for each in list(self.original_module.modules()):
                stack.enter_context(in_float(each, quantized_names(each)))
            return method(self, *args, **kwargs)

    return call
