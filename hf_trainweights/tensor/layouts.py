"""When a module holds its quantized weights in a kernel's layout, and when as they lie in files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from hf_trainweights.kernels.layouts import Layout
from hf_trainweights.tensor.memory import return_freed_memory
from hf_trainweights.tensor.modules import parameter_places
from hf_trainweights.tensor.placements import local_tensor
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# Freed memory that is kept at most while weights are exchanged.
_FREED_BYTES = 4 << 20


def choose_layouts_(module: nn.Module) -> None:
    """Hold each quantized weight of a linear layer in the layout in which it is multiplied fastest, in place.

    Nothing changes where a part of the module is on another device: accelerate then moves weights for every call. Nor
    does it where FSDP gathers weights for every call, because they travel as they lie in files.

    Args:
        module: Any module.
    """
    if _is_gathered(module) or any(parameter.device.type != "cpu" for parameter in module.parameters()):
        return
    for places in parameter_places(module).values():
        weight = local_tensor(getattr(*places[0]))
        if isinstance(weight, QuantizedTensor) and not all(isinstance(owner, nn.Embedding) for owner, _ in places):
            _hold_in_best_layout_(weight)


def _is_gathered(module: nn.Module) -> bool:
    """Return whether `fully_shard` was applied to a module or a part of it."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(each, FSDPModule) for each in module.modules())


def choose_layout_of_registered(module: nn.Module, parameter: nn.Parameter | None) -> None:
    """Hold a quantized weight that a module gets in the layout in which it is multiplied fastest, in place.

    PyTorch calls this whenever a module gets a parameter, be it by `load_state_dict(assign=True)`.

    Args:
        module: The module. An embedding looks rows up, for which the stored tensors are best.
        parameter: What it is to be. Left alone where `as_parameter` made it: a load chooses when it is over, since
            weights may be memory-mapped until then, and accelerate may yet place parts of the model elsewhere.
    """
    if not isinstance(parameter, QuantizedTensor) or parameter.layout_is_settled or parameter.is_traced:
        return
    if not isinstance(module, nn.Embedding):
        _hold_in_best_layout_(parameter)


def _hold_in_best_layout_(weight: QuantizedTensor) -> None:
    weight.hold_(weight.in_layout(weight.best_layout()).held)


@contextlib.contextmanager
def canonical_layouts(weights: Iterable[torch.Tensor]) -> Iterator[None]:
    """Hold weights as they lie in files within the context, and as before afterwards; one by one, in place.

    A weight computes the same meanwhile, if more slowly.

    Args:
        weights: Tensors; those that are no quantized weights in a kernel's layout are left alone.
    """
    private = [
        (weight, weight.kernel_layout)
        for weight in map(local_tensor, weights)
        if isinstance(weight, QuantizedTensor) and weight.kernel_layout is not None
    ]
    try:
        _hold_one_by_one_((weight, None) for weight, _ in private)
        yield
    finally:
        _hold_one_by_one_(private)


def _hold_one_by_one_(weights: Iterable[tuple[QuantizedTensor, Layout | None]]) -> None:
    freed_bytes = 0
    for weight, layout in weights:
        freed_bytes += weight.stored_bytes
        weight.hold_(weight.in_layout(layout).held)
        # The C library fills other holes first, so that freed memory would add up to the size of the model.
        if freed_bytes > _FREED_BYTES:
            return_freed_memory()
            freed_bytes = 0
