"""Functions for quantized weights of any nn.Module: make them parameters, dequantize, measure, replace, print them."""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from hf_trainweights.tensor.distributed.placements import is_distributed, local_tensor, with_local
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor, unsupported_by_torchscript
from hf_trainweights.tensor.traced_modules import watch_parameters


def as_parameter(weight: QuantizedTensor) -> nn.Parameter:
    """Make a quantized weight a frozen parameter, in place, and return it. Only the caller may hold the weight."""
    # nn.Parameter does the same to a copy from `detach`, and making the copies takes a tenth of the time of a reload.
    weight._is_param = True  # type: ignore[attr-defined]
    return weight  # type: ignore[return-value]


def dequantize_weights(module: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace the quantized weights of a module by float weights, in each weight's own dtype if `dtype` is None."""
    for places in parameter_places(module).values():
        owner, name = places[0]
        parameter = getattr(owner, name)
        weight = local_tensor(parameter)
        if isinstance(weight, QuantizedTensor):
            values = weight.dequantize(dtype).contiguous()
            values = with_local(parameter, values) if is_distributed(parameter) else values
            put_parameter(places, nn.Parameter(values, requires_grad=False))


def get_model_size_in_bytes(module: nn.Module) -> int:
    """Return the bytes that a module's parameters and buffers really hold.

    Args:
        module: Any module. Memory that several tensors share counts once; a quantized weight counts its stored tensors.

    Raises:
        NotImplementedError: A tensor is sparse.

    Examples:
        >>> get_model_size_in_bytes(nn.Linear(4, 4, bias=False))
        64
    """
    sizes: dict[int, int] = {}
    for tensor in map(local_tensor, [*module.parameters(), *module.buffers()]):
        for stored in tensor.held.tensors.values() if isinstance(tensor, QuantizedTensor) else [tensor]:
            storage = stored.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def is_quantized(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a quantized weight, or a DTensor of quantized shards."""
    return isinstance(local_tensor(parameter), QuantizedTensor)


def parameter_places(module: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return the owners and names of each parameter, by its identity; a tied parameter has several."""
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            places[id(parameter)].append((owner, name))
    return places


def put_parameter(places: list[tuple[nn.Module, str]], parameter: nn.Parameter) -> None:
    """Put a parameter into all places of another parameter, which `parameter_places` returned."""
    for owner, name in places:
        setattr(owner, name, parameter)


@contextlib.contextmanager
def substituted(
    places: Mapping[int, list[tuple[nn.Module, str]]], weights: Iterable[tuple[nn.Parameter, nn.Parameter]]
) -> Iterator[None]:
    """Put other weights into a module within the context; each may be made when the ones before it are in place."""
    changed = []
    try:
        for weight, other in weights:
            changed.append(weight)
            put_parameter(places[id(weight)], other)
        yield
    finally:
        for weight in changed:
            put_parameter(places[id(weight)], weight)


def describe(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Make `print(module)` name the module's quantized weights, and torch.jit.script refuse it, while it has any.

    PyTorch calls this whenever a module gets a parameter, also in `load_state_dict(assign=True)`.
    """
    own = vars(module)
    if isinstance(parameter, QuantizedTensor):
        if "extra_repr" not in own:
            own["extra_repr"] = Description(module)
        own["__prepare_scriptable__"] = refuse_torchscript
        watch_parameters(module)
    elif own.get("__prepare_scriptable__") is refuse_torchscript:
        others = (weight for key, weight in module.named_parameters(recurse=False) if key != name)
        if not any(isinstance(weight, QuantizedTensor) for weight in others):
            del own["__prepare_scriptable__"]
            if isinstance(own["extra_repr"], Description):
                del own["extra_repr"]


class Description:
    """The `extra_repr` of a module, which it refers to weakly: a cycle would keep weights until garbage collection."""

    def __init__(self, module: nn.Module):
        self._module = weakref.ref(module)

    def __call__(self) -> str:
        """Return the text of `extra_repr`, or "" if the module is gone."""
        module = self._module()
        return "" if module is None else extra_repr(module)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._module(),)


def extra_repr(module: nn.Module) -> str:
    """Describe the module itself and its quantized weights; models pickled by older versions call this."""
    own = type(module).extra_repr(module)
    weights = {name: p.format for name, p in module.named_parameters(recurse=False) if isinstance(p, QuantizedTensor)}
    return ", ".join(([own] if own else []) + [f"{name}={form}" for name, form in weights.items()])


def refuse_torchscript() -> None:
    """Raise an UnsupportedError. torch.jit.script calls this, and would save quantized weights as garbage."""
    raise unsupported_by_torchscript()
