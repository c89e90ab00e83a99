"""Quantized weights of any nn.Module: made parameters, dequantized, measured, exchanged in place, named in print."""

from __future__ import annotations

import weakref
from collections import defaultdict

import torch
from torch import nn

from hf_trainweights.tensor.distributed.placements import is_distributed, local_tensor, with_local
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor, unsupported_by_torchscript


def as_parameter(weight: QuantizedTensor) -> nn.Parameter:
    """Make a quantized weight that nothing else holds a frozen parameter, in place, and return it."""
    # nn.Parameter does the same to a copy that it gets from `detach`, which takes a tenth of the time of a reload.
    weight._is_param = True  # type: ignore[attr-defined]
    return weight  # type: ignore[return-value]


def dequantize_weights(module: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace the quantized weights of a module by float weights, in each weight's own dtype if it is None."""
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
        module: Any module; memory that several tensors share counts once, a quantized weight by what holds it.

    Raises:
        NotImplementedError: A tensor is sparse.

    Examples:
        >>> get_model_size_in_bytes(nn.Linear(4, 4, bias=False))
        64
    """
    sizes: dict[int, int] = {}
    for tensor in map(local_tensor, [*module.parameters(), *module.buffers()]):
        for held in tensor.held.tensors.values() if isinstance(tensor, QuantizedTensor) else [tensor]:
            storage = held.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def is_quantized(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a quantized weight, or one that ranks hold quantized parts of."""
    return isinstance(local_tensor(parameter), QuantizedTensor)


def parameter_places(module: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return where each parameter stands, by its identity: a tied one in several places."""
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            places[id(parameter)].append((owner, name))
    return places


def put_parameter(places: list[tuple[nn.Module, str]], parameter: nn.Parameter) -> None:
    """Put a parameter into all places of another one, as `parameter_places` has them."""
    for owner, name in places:
        setattr(owner, name, parameter)


def describe(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Make `print(module)` name the module's quantized weights, and torch.jit.script refuse it, while it has any.

    PyTorch calls this whenever a module gets a parameter, be it by `load_state_dict(assign=True)`.
    """
    own = vars(module)
    if isinstance(parameter, QuantizedTensor):
        if "extra_repr" not in own:
            own["extra_repr"] = Description(module)
        own["__prepare_scriptable__"] = refuse_torchscript
    elif own.get("__prepare_scriptable__") is refuse_torchscript:
        others = (weight for key, weight in module.named_parameters(recurse=False) if key != name)
        if not any(isinstance(weight, QuantizedTensor) for weight in others):
            del own["__prepare_scriptable__"]
            if isinstance(own["extra_repr"], Description):
                del own["extra_repr"]


class Description:
    """The `extra_repr` of a module, held weakly: a cycle would keep the weights until garbage is collected."""

    def __init__(self, module: nn.Module):
        self._module = weakref.ref(module)

    def __call__(self) -> str:
        """Return what `extra_repr` does, nothing for a module that is gone."""
        module = self._module()
        return "" if module is None else extra_repr(module)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._module(),)


def extra_repr(module: nn.Module) -> str:
    """Return the module's own description and its quantized weights'; models that were pickled once call it."""
    own = type(module).extra_repr(module)
    weights = {name: p.format for name, p in module.named_parameters(recurse=False) if isinstance(p, QuantizedTensor)}
    return ", ".join(([own] if own else []) + [f"{name}={form}" for name, form in weights.items()])


def refuse_torchscript() -> None:
    """Raise: torch.jit.script calls this on every module, and would save quantized weights as garbage."""
    raise unsupported_by_torchscript()
