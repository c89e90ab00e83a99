"""Quantized weights of any nn.Module: made parameters, dequantized, measured, and exchanged in place."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from hf_trainweights.tensor.distributed.placements import is_distributed, local_tensor, with_local
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor


def as_parameter(weight: QuantizedTensor) -> nn.Parameter:
    """Make a quantized weight that nothing else holds a frozen parameter, in place, and return it."""
    # nn.Parameter does the same to a copy that it gets from `detach`, which takes a tenth of the time of a reload.
    weight._is_param = True  # type: ignore[attr-defined]
    return weight  # type: ignore[return-value]


def dequantize_(module: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace the quantized weights of a module by the float weights they stand for, in place.

    Args:
        module: Any module.
        dtype: Dtype of the float weights; each weight's own if None.

    Raises:
        CorruptFileError: A stored tensor does not fit its format.

    Examples:
        >>> from hf_trainweights import TrainWeightsConfig, quantize_
        >>> layer = nn.Linear(64, 64)
        >>> _ = quantize_(layer, TrainWeightsConfig("int8"))
        >>> dequantize_(layer)
        >>> type(layer.weight).__name__
        'Parameter'
    """
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


def parameter_places(module: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return where each parameter stands, by its identity: a tied one in several places."""
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            places[id(parameter)].append((owner, name))
    return places


def put_parameter(places: list[tuple[nn.Module, str]], parameter: nn.Parameter) -> None:
    """Put a parameter into all places of another one, as `parameter_places` has them."""
    for owner, name in places:
        setattr(owner, name, parameter)
