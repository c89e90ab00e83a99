"""A module's state dict as plain tensors, and back, so that a file names no class.

A quantized weight is stored as a dict of its stored tensors. A parameter of another tensor subclass is stored as a dict
of its inner tensors, by the names that its `__tensor_flatten__` gives. Loading copies them into the same inner tensors
of a module that was built alike. So a file does not have to name the class.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.formats import get_format
from hf_trainweights.tensor.modules import parameter_places, put_parameter
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor, rebuild_quantized_tensor

# torch.compile, FSDP and its companions wrap modules in these attributes.
_WRAPPERS = re.compile(r"(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")


def module_state(module: nn.Module) -> dict[str, Any]:
    """Return `module.state_dict()` with every tensor subclass replaced by a dict of plain tensors.

    The tensors share memory with the module, except weights that a kernel holds in a layout of its own. ConfigError: a
    tensor is of a subclass that has no `__tensor_flatten__`.
    """
    state = module.state_dict()
    for name, value in state.items():
        if isinstance(value, Tensor):
            state[name] = _plain(value, name)
    return state


def load_module_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Copy a state into a module of the same architecture, which keeps its dtypes and devices.

    CorruptFileError lists names, shapes or inner tensors that differ. The module may be partly changed then.
    """
    own = module.state_dict(keep_vars=True)
    state = _named_as(own, state)
    nested = {name for name, value in state.items() if isinstance(value, dict) and isinstance(own.get(name), Tensor)}
    plain = OrderedDict((name, value) for name, value in state.items() if name not in nested)
    plain._metadata = getattr(state, "_metadata", {})  # pyright: ignore[reportAttributeAccessIssue] (torch's own)
    try:
        result = module.load_state_dict(plain, strict=False)
    except RuntimeError as error:  # torch's only error for a shape that differs
        raise _mismatch("the same shapes", str(error)[:2000]) from error
    missing = sorted(set(result.missing_keys) - nested)
    if missing or result.unexpected_keys:
        raise _mismatch("the same names", f"missing {missing}, unexpected {sorted(result.unexpected_keys)}"[:2000])
    with torch.no_grad():
        for name in nested:
            _copy_inner(own[name], state[name], name)


def unwrapped_name(name: str) -> str:
    """Return the name of a weight without those of the wrappers that torch.compile and FSDP put around modules."""
    return _WRAPPERS.sub("", name)


def _named_as(own: Mapping[str, Any], state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give weights the names in the module if it is wrapped and the saved one was not, or the other way round."""
    if own.keys() == state.keys():
        return state
    names = {unwrapped_name(name): name for name in own}
    return {names.get(unwrapped_name(name), name): value for name, value in state.items()}


def quantized_weights(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return format, dtype and `transposed` of quantized weights by name, as JSON; `module_state` lacks these facts."""
    return {
        name: {
            "format": weight.format.get_config(),
            "dtype": str(weight.dtype).removeprefix("torch."),
            "transposed": weight.transposed,
        }
        for name, weight in module.state_dict(keep_vars=True).items()
        if isinstance(weight, QuantizedTensor)
    }


def adopt_quantized_weights(module: nn.Module, state: Mapping[str, Any], weights: Mapping[str, Any]) -> bool:
    """Replace float weights of a module by the quantized weights of a state; return whether there were any.

    Tensors are used, not copied. CorruptFileError: they do not fit the module, or are not those of a quantized weight.
    """
    own, places = module.state_dict(keep_vars=True), parameter_places(module)
    float_weights = {name: entry for name, entry in weights.items() if not isinstance(own.get(name), QuantizedTensor)}
    for name, description in float_weights.items():
        parameter = own.get(name)
        if not isinstance(parameter, Tensor) or id(parameter) not in places:
            raise _mismatch(f"a parameter {name}", type(parameter).__name__)
        weight = _quantized(name, description, state.get(name))
        if weight.shape != parameter.shape:
            raise _mismatch(f"{name} of shape {list(weight.shape)}", str(list(parameter.shape)))
        put_parameter(places[id(parameter)], nn.Parameter(weight, requires_grad=False))
    return bool(float_weights)


def _quantized(name: str, description: Any, stored: Any) -> QuantizedTensor:
    qdata = stored.get("qdata") if isinstance(stored, dict) else None
    config = description.get("format") if isinstance(description, dict) else None
    if not isinstance(qdata, Tensor) or qdata.dim() < 2 or not isinstance(config, dict):
        raise _mismatch(f"the stored tensors and the format of {name}", f"{type(qdata).__name__} and {config!r}")
    shape, dtype = get_format(config).shape_of(qdata), getattr(torch, str(description.get("dtype")), None)
    arguments: Any = stored, config, shape, dtype, description.get("transposed") is True
    return rebuild_quantized_tensor(*arguments, is_parameter=False)


def transient_buffers(module: nn.Module) -> dict[str, Any]:
    """Return the buffers that a state dict leaves out, such as rotary embeddings' frequencies; memory is shared."""
    persistent = module.state_dict().keys()
    buffers = module.named_buffers(remove_duplicate=False)
    return {name: _plain(buffer, name) for name, buffer in buffers if name not in persistent}


def load_transient_buffers(module: nn.Module, buffers: Mapping[str, Any]) -> None:
    """Set a module's transient buffers with their dtypes, on its own devices; CorruptFileError: it has others."""
    own = dict(module.named_buffers(remove_duplicate=False))
    if set(buffers) != set(own) - module.state_dict().keys():
        raise _mismatch(f"the buffers {sorted(buffers)}", str(sorted(own)))
    for name, value in buffers.items():
        owner, _, leaf = name.rpartition(".")
        if isinstance(value, Tensor):
            setattr(module.get_submodule(owner), leaf, value.to(own[name].device))
        else:
            _copy_inner(own[name], value, name)


def state_sha256(state: Mapping[str, Any]) -> str:
    """Return a digest of the names, dtypes, shapes and bytes of a state's tensors, whatever their order and device."""
    digest = hashlib.sha256()
    for name, tensor in sorted(_tensors(state, ())):
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        header = json.dumps([name, str(tensor.dtype), list(tensor.shape), data.numel()])
        digest.update(header.encode() + b"\n")
        digest.update(data.numpy().data)
    return digest.hexdigest()


def _plain(tensor: Tensor, name: str) -> Tensor | dict[str, Any]:
    if type(tensor) in (Tensor, nn.Parameter):
        return tensor
    tensors = _inner_tensors(tensor)
    if not tensors:
        expected = "a plain tensor or a subclass with __tensor_flatten__"
        raise ConfigError(name, expected, type(tensor).__qualname__, "Give the class __tensor_flatten__.")
    return {inner: _plain(value, f"{name}.{inner}") for inner, value in tensors.items()}


def _inner_tensors(tensor: Tensor) -> Mapping[str, Tensor]:
    """Return the inner tensors of a quantized weight or another subclass; empty if it has no `__tensor_flatten__`."""
    if isinstance(tensor, QuantizedTensor):
        return tensor.tensors
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    return {name: getattr(tensor, name) for name in flatten()[0]} if flatten else {}


def _copy_inner(target: Tensor, stored: Any, name: str) -> None:
    if isinstance(stored, Tensor):
        if type(target) not in (Tensor, nn.Parameter) or target.shape != stored.shape or target.dtype != stored.dtype:
            own = f"{type(target).__qualname__} {target.dtype} {list(target.shape)}"
            raise _mismatch(f"{name} as {stored.dtype} {list(stored.shape)}", own)
        target.copy_(stored)
        return
    tensors = _inner_tensors(target)
    if tensors.keys() != stored.keys():
        raise _mismatch(f"{name} with inner tensors {sorted(stored)}", str(sorted(tensors)))
    for inner, tensor in tensors.items():
        _copy_inner(tensor, stored[inner], f"{name}.{inner}")


def _tensors(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _tensors(item, (*path, str(name)))


def _mismatch(expected: str, found: str) -> CorruptFileError:
    return CorruptFileError("the model's state", expected, found, "Build the model as it was when it was saved.")
