"""Which parameters of a module can be quantized, told by structure: no value is read, so the meta device serves too.

They are the weights of nn.Linear, of GPT-2's Conv1D (stored the other way round), of embeddings, and 3-D expert
parameters in both layouts.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def is_weight(owner: nn.Module, leaf: str, parameter: Tensor) -> bool:
    """Return whether a parameter is one that can be quantized."""
    if isinstance(owner, nn.Linear | nn.Embedding | Conv1D):
        return leaf == "weight" and parameter.dim() == 2
    return is_experts(owner, parameter)


def is_experts(owner: nn.Module, parameter: Tensor) -> bool:
    """Return whether a parameter holds the weights of several experts, `[E, N, K]` or `[E, K, N]`."""
    named = hasattr(owner, "num_experts") or hasattr(owner, "is_transposed") or "expert" in type(owner).__name__.lower()
    return parameter.dim() == 3 and named and min(parameter.shape[1:]) > 1


def is_transposed(owner: nn.Module, parameter: Tensor) -> bool:
    """Return whether a module reduces along the last dimension but one of its weight."""
    if parameter.dim() != 3:
        return isinstance(owner, Conv1D)
    declared = getattr(owner, "is_transposed", None)
    if declared is not None:
        return bool(declared)
    first, hidden = getattr(owner, "gate_up_proj", None), getattr(owner, "hidden_size", None)
    return isinstance(first, Tensor) and first.dim() == 3 and first.shape[1] == hidden != first.shape[2]
