"""Quantized weights of any nn.Module: held, dequantized, measured, exchanged in place, and shown by `print`."""

from __future__ import annotations

import functools
import logging
from collections import defaultdict

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from hf_trainweights import kernels
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor, unsupported_by_torchscript

_logger = logging.getLogger(__name__)


def as_parameter(weight: QuantizedTensor) -> nn.Parameter:
    """Make a quantized weight a frozen parameter, in place.

    nn.Parameter marks a tensor likewise, but a copy of it from `detach`: a tenth of the time that a reload takes.

    Args:
        weight: A weight that nothing else holds.

    Returns:
        The weight itself.

    Example:
        >>> from hf_trainweights.formats import get_format
        >>> weight = as_parameter(QuantizedTensor.quantize(torch.ones(4, 8), get_format({"format": "int8"})))
        >>> isinstance(weight, nn.Parameter), weight.requires_grad
        (True, False)
    """
    weight._is_param = True  # type: ignore[attr-defined]
    return weight  # type: ignore[return-value]


def choose_layouts_(module: nn.Module) -> None:
    """Hold each quantized weight of a linear layer in the memory layout in which it is multiplied fastest, in place.

    Nothing changes where a part of the module is on another device: accelerate then moves weights for every call.

    Args:
        module: Any module.
    """
    if any(parameter.device.type != "cpu" for parameter in module.parameters()):
        return
    slow = 0
    for places in parameter_places(module).values():
        weight = getattr(*places[0])
        if isinstance(weight, QuantizedTensor) and not all(isinstance(owner, nn.Embedding) for owner, _ in places):
            slow += weight.format.name == "int4" and weight.dtype != torch.bfloat16
            form = kernels.layout(weight.format, weight.stored_shape, weight.scale.dtype, weight.device)
            if form != weight.format and weight.dtype == weight.scale.dtype:
                put_parameter(places, as_parameter(weight.in_layout(form)))
    if slow:
        _logger.warning(
            "%d int4 weights without bfloat16 activations: on the CPU they take longer than float weights. "
            "dtype=torch.bfloat16, or int8, is fast.",
            slow,
        )


def dequantize_(module: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace the quantized weights of a module by the float weights they stand for, in place.

    Args:
        module: Any module.
        dtype: Dtype of the float weights; each weight's own if None.

    Raises:
        CorruptFileError: A stored tensor does not fit its format.

    Example:
        >>> from hf_trainweights import TrainWeightsConfig, quantize_
        >>> layer = nn.Linear(64, 64)
        >>> _ = quantize_(layer, TrainWeightsConfig("int8"))
        >>> dequantize_(layer)
        >>> type(layer.weight).__name__
        'Parameter'
    """
    for places in parameter_places(module).values():
        owner, name = places[0]
        weight = getattr(owner, name)
        if isinstance(weight, QuantizedTensor):
            put_parameter(places, nn.Parameter(weight.dequantize(dtype).contiguous(), requires_grad=False))


def get_model_size_in_bytes(module: nn.Module) -> int:
    """Return the bytes that a module's parameters and buffers really hold.

    Args:
        module: Any module; memory that several tensors share counts once, a quantized weight by its stored tensors.

    Raises:
        NotImplementedError: A tensor is sparse.

    Example:
        >>> get_model_size_in_bytes(nn.Linear(4, 4, bias=False))
        64
    """
    sizes: dict[int, int] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        for held in tensor.tensors.values() if isinstance(tensor, QuantizedTensor) else [tensor]:
            storage = held.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def describe(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Make `print(module)` name the module's quantized weights, and torch.jit.script refuse it, while it has any.

    PyTorch calls this whenever a module gets a parameter, be it by `load_state_dict(assign=True)`.

    Args:
        module: The module.
        name: Name of the parameter there.
        parameter: What it is to be.
    """
    own = vars(module)
    if isinstance(parameter, QuantizedTensor):
        if "extra_repr" not in own:
            own["extra_repr"] = functools.partial(extra_repr, module)
        own["__prepare_scriptable__"] = refuse_torchscript
    elif own.get("__prepare_scriptable__") is refuse_torchscript:
        others = (weight for key, weight in module._parameters.items() if key != name)
        if not any(isinstance(weight, QuantizedTensor) for weight in others):
            del own["__prepare_scriptable__"]
            if getattr(own["extra_repr"], "func", None) is extra_repr:
                del own["extra_repr"]


register_module_parameter_registration_hook(describe)  # type: ignore[arg-type]


def extra_repr(module: nn.Module) -> str:
    """Return the module's own description and its quantized weights'.

    Args:
        module: The module to describe.
    """
    own = type(module).extra_repr(module)
    weights = {
        name: p.format.canonical for name, p in module.named_parameters(recurse=False) if isinstance(p, QuantizedTensor)
    }
    return ", ".join(([own] if own else []) + [f"{name}={form}" for name, form in weights.items()])


def refuse_torchscript() -> None:
    """Raise: torch.jit.script calls this on every module, and would save quantized weights as garbage.

    Raises:
        UnsupportedError: Always.
    """
    raise unsupported_by_torchscript()


def parameter_places(module: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return where each parameter stands, by its identity: a tied one in several places.

    Args:
        module: Any module.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            places[id(parameter)].append((owner, name))
    return places


def put_parameter(places: list[tuple[nn.Module, str]], parameter: nn.Parameter) -> None:
    """Put a parameter in the place of another.

    Args:
        places: Owner and name, one of `parameter_places`.
        parameter: The parameter.
    """
    for owner, name in places:
        setattr(owner, name, parameter)
