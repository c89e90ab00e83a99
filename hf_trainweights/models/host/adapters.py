"""PEFT's layers over quantized weights: methods that initialise, merge or unmerge an adapter get the weight in float.

PEFT chooses its layer for a quantized weight by the class of the module, from a fixed list of quantization methods.
This package quantizes the weight of a plain `nn.Linear`. PEFT therefore uses its layers for float weights, and these
merge by writing to the weight in place. So the methods of PEFT that write to a weight are wrapped: while one runs, the
weight is a float tensor, and if the method changes it, it is quantized again. A hook of PyTorch tells when a PEFT layer
takes in a module, so PEFT is not imported here, and stays unchanged until it meets a quantized weight. Over float
weights a wrapped method only calls PEFT's own.
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

# Methods of a PEFT layer that may write to the weight below it, or copy that weight into new parameters.
_WRITING = ("update_layer", "merge", "unmerge")
# Methods of PEFT's models that call the methods above on many layers.
_CALLING_MANY = ("inject_adapter", "merge_adapter", "unmerge_adapter", "merge_and_unload")
# The same for diffusers: methods that call many layers, and the classes of pipelines and models that have them.
_FUSING = ("fuse_lora", "unfuse_lora")
_FUSING_CLASSES = (("diffusers.loaders.lora_base", "LoraBaseMixin"), ("diffusers.loaders.peft", "PeftAdapterMixin"))

# A PEFT class keeps the module that it wraps in the attribute on the left. On the right: module and name of its base.
_BASE_CLASSES = {
    "model": ("peft.tuners.tuners_utils", "BaseTuner"),
    "base_layer": ("peft.tuners.tuners_utils", "BaseTunerLayer"),
    "original_module": ("peft.utils.other", "AuxiliaryTrainingWrapper"),
}

_Method = Callable[..., Any]


def meet_adapters(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Wrap the methods of a PEFT class when an instance of it takes in a module with quantized weights.

    PyTorch calls this whenever a module gets a submodule.
    """
    base_module, base_name = _BASE_CLASSES.get(name, ("", ""))
    cls = getattr(sys.modules.get(base_module), base_name, None)
    if cls is None or not isinstance(module, cls) or submodule is None:
        return
    if not any(isinstance(parameter, QuantizedTensor) for parameter in submodule.parameters()):
        return
    if name == "model":
        _wrap(type(module), _CALLING_MANY, _with_one_warning)
        for fusing_module, fusing_name in _FUSING_CLASSES:
            _wrap(getattr(sys.modules.get(fusing_module), fusing_name, object), _FUSING, _with_one_warning)
    elif name == "base_layer":
        _wrap(type(module), _WRITING, _with_float_weight)
        _wrap(type(module), ("get_base_weight",), _dequantized)
        _wrap(type(module), ("_activate_lora",), _over_an_alias)
    else:
        _wrap(type(module), ("update",), _with_float_copy)


def _wrap(cls: type, names: tuple[str, ...], wrapper: Callable[[_Method], _Method]) -> None:
    """Wrap the named methods in a class and in those of its bases that define them, each method once."""
    for base in cls.__mro__:
        for name in set(names) & vars(base).keys():
            method = vars(base)[name]
            if not hasattr(method, "_wrapped_for_quantized_weights"):
                wrapped = _over_quantized_weights(method, wrapper(method))
                wrapped._wrapped_for_quantized_weights = True  # type: ignore[attr-defined]
                setattr(base, name, wrapped)


def _over_quantized_weights(method: _Method, wrapped: _Method) -> _Method:
    """Return a method that calls the wrapped one if any weight below is quantized, and else PEFT's own."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_module = isinstance(self, nn.Module)  # a pipeline of diffusers is no module, but its models may be quantized
        is_float = is_module and not any(isinstance(parameter, QuantizedTensor) for parameter in self.parameters())
        return (method if is_float else wrapped)(self, *args, **kwargs)

    return call


def _with_one_warning(method: _Method) -> _Method:
    """Let a method that merges many adapters warn once that this rounds, and not for each layer."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with rounding_said_once():
            return method(self, *args, **kwargs)

    return call


def _with_float_weight(method: _Method) -> _Method:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        base_layer = self.get_base_layer()
        names = [] if _ignores_weight(method, kwargs) else quantized_names(base_layer)
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
            # The weight has its old values again, so the list of merged adapters gets its old content too.
            self.merged_adapters[:] = merged
            raise

    return call


def _over_an_alias(method: _Method) -> _Method:
    """Let a wrapper of one parameter parametrize an alias of the weight: a new object with the same stored tensors.

    To parametrize a tensor subclass, PyTorch swaps the contents of the object. It refuses to while an autograd graph of
    an earlier forward still holds that object.
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


def _ignores_weight(method: _Method, options: dict[str, Any]) -> bool:
    """Return whether LoRA is about to initialise an adapter without a look at the weight, as it does by default.

    Then no weight is dequantized, which would take longer than all the rest of `get_peft_model`.
    """
    # KaSA removes the smallest singular values of the weight itself.
    is_kasa = getattr(options.get("config"), "kasa_config", None) is not None
    return method.__name__ == "update_layer" and isinstance(_initialisation(options), bool) and not is_kasa


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
    """Return the prefixes of the names of parameters that PEFT has added to a module, to train them."""
    prefixes: list[str] = []
    for name, submodule in module.named_modules():
        prompts = ("prompt_encoder",) if hasattr(submodule, "peft_config") else ()
        layers: tuple[str, ...] = (*getattr(submodule, "adapter_layer_names", ()), *prompts)
        prefixes += [f"{name}.{layer}.".removeprefix(".") for layer in layers]
    return tuple(prefixes)


def quantized_names(module: nn.Module) -> list[str]:
    """Return the names of the quantized weights that a module itself owns, if they have values."""
    own = module.named_parameters(recurse=False)
    return [name for name, weight in own if isinstance(weight, QuantizedTensor) and not weight.is_meta]


def _dequantized(method: _Method) -> _Method:
    def call(self: Any) -> Any:
        weight: Tensor = method(self)
        return weight.dequantize() if isinstance(weight, QuantizedTensor) else weight

    return call


def _with_float_copy(method: _Method) -> _Method:
    """Let a wrapper make a float copy of a layer that is to be trained in full."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for submodule in list(self.original_module.modules()):
                stack.enter_context(in_float(submodule, quantized_names(submodule)))
            return method(self, *args, **kwargs)

    return call
