"""Which tensors of a weight file are buffers, told from files alone where no module is at hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def find_buffers(weights: Mapping[str, Any], optimizer: Mapping[str, Any]) -> set[str]:
    """Return the names of all tensors of a flat state dict that an optimizer's state does not show to be trained.

    By the names that an optimizer made from `model.named_parameters()` records. Else by shape: as many states as
    tensors of a shape are there if none of these is a buffer. Without states of the parameters' shapes (plain SGD,
    Adafactor, no optimizer) only tensors of two and more dimensions count as trained. A frozen weight is taken for a
    buffer, which costs nothing: an exact difference of what does not change is next to nothing.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        >>> sorted(find_buffers(model.state_dict(), torch.optim.SGD(model.named_parameters()).state_dict()))
        ['1.num_batches_tracked', '1.running_mean', '1.running_var']
    """
    tensors = {name: tensor for name, tensor in weights.items() if isinstance(tensor, Tensor)}
    trained = _recorded_names(optimizer)
    if trained and trained <= tensors.keys():
        return tensors.keys() - trained
    shapes = _state_shapes(optimizer)
    if shapes is None:
        return {name for name, tensor in tensors.items() if tensor.dim() < 2}
    found = Counter(tensor.shape for tensor in tensors.values())
    return {name for name, tensor in tensors.items() if found[tensor.shape] > shapes[tensor.shape]}


def _recorded_names(optimizer: Mapping[str, Any]) -> set[str]:
    return {name for group in optimizer.get("param_groups", ()) for name in group.get("param_names", ())}


def _state_shapes(optimizer: Mapping[str, Any]) -> Counter[torch.Size] | None:
    """Count the parameters by shape; None if a state does not show its parameter's."""
    shapes: Counter[torch.Size] = Counter()
    for state in optimizer.get("state", {}).values():
        of_parameter = {value.shape for value in state.values() if isinstance(value, Tensor) and value.dim()}
        if len(of_parameter) > 1:
            return None
        shapes.update(of_parameter)
    return shapes or None
