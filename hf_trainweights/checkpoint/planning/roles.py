"""Tells weights, buffers and states of an optimizer apart, by names and shapes of the tensors of training state.

torch.distributed.checkpoint (DCP) flattens nested dicts and joins the keys by dots. A dict with `param_groups` beside
`state` is an optimizer's state dict, whether that was flat or not, so `optim.state.layers.0.weight.exp_avg` is a state
if there is an `optim.param_groups`. All other tensors belong to a model.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from hf_trainweights.checkpoint.encoded.tree import Key

# The states that Adam keeps for each parameter, by the names that are also their roles.
MOMENTS = frozenset({"exp_avg", "exp_avg_sq"})


def is_optimizer_state(tree: object) -> TypeGuard[dict[str, Any]]:
    """Return whether a tree has the layout of `optimizer.state_dict()`, so that callers need no further checks."""
    if not isinstance(tree, dict):
        return False
    states, groups = tree.get("state"), tree.get("param_groups")
    if not isinstance(states, Mapping) or not isinstance(groups, list):
        return False
    return all(isinstance(values, Mapping) for values in states.values()) and all(map(_is_group, groups))


def optimizer_parameter_names(model: nn.Module, optimizer: Any) -> dict[int, str]:
    """Return the names of an optimizer's parameters by their index in its state dict.

    Indices run through the groups in their order. Parameters of other modules than `model` are left out.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = getattr(optimizer, "param_groups", [])
    parameters = dict.fromkeys(id(parameter) for group in groups for parameter in group["params"])
    return {index: names[key] for index, key in enumerate(parameters) if key in names}


def is_number(value: object) -> bool:
    """Return whether a value is a number, or a tensor with one element."""
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def recorded_names(optimizer: Mapping[str, Any]) -> dict[Key, str]:
    """Return the names of parameters by index that a state dict records, if `model.named_parameters()` made its groups.

    A state dict that was gathered from several ranks has the names themselves instead of indices.
    """
    names: dict[Key, str] = {}
    for group in optimizer["param_groups"]:
        gathered = [param for param in group["params"] if isinstance(param, str)]
        names.update(zip(group["params"], group.get("param_names", gathered), strict=False))
    return names


def _is_group(group: object) -> bool:
    if not isinstance(group, Mapping):
        return False
    params, names = group.get("params"), group.get("param_names", [])
    if not isinstance(params, list) or not all(isinstance(param, int | str) for param in params):
        return False
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return False
    if "betas" not in group:
        return True
    betas = group["betas"]  # Adam has two, AdEMAMix three
    if not isinstance(betas, tuple | list) or len(betas) < 2 or not is_number(group.get("lr")):
        return False
    return all(is_number(beta) and 0 <= beta < 1 for beta in betas)


def find_buffers(weights: Mapping[str, Any], optimizer: Mapping[str, Any]) -> set[str]:
    """Return the names of all tensors of a flat state dict that an optimizer's state does not show to be trained.

    If the optimizer records names (see `recorded_names`), these are trained. Else shapes decide: the tensors of a shape
    are trained if the optimizer has states for at least as many parameters of that shape. If it has no states of the
    parameters' shapes (plain SGD, Adafactor, no optimizer), tensors of two and more dimensions count as trained. A
    frozen weight counts as a buffer, which costs next to no space, because it is stored as an exact difference of zero.
    """
    tensors = {name: tensor for name, tensor in weights.items() if isinstance(tensor, Tensor)}
    # Tied weights have one memory and one state.
    memory = {name: (tensor.data_ptr() or id(tensor), tensor.shape) for name, tensor in tensors.items()}
    trained = set(recorded_names(optimizer).values()) if optimizer else set()
    if trained and trained <= tensors.keys():
        trained_memory = {memory[name] for name in trained}
        return {name for name, address in memory.items() if address not in trained_memory}
    state_counts = _state_shapes(optimizer)
    if state_counts is None:
        return {name for name, tensor in tensors.items() if tensor.dim() < 2}
    tensor_counts = Counter(shape for _, shape in set(memory.values()))
    return {name for name, tensor in tensors.items() if tensor_counts[tensor.shape] > state_counts[tensor.shape]}


def _state_shapes(optimizer: Mapping[str, Any]) -> Counter[torch.Size] | None:
    """Count the parameters by the shape of their states; None if there are none, or those of one parameter differ."""
    counts: Counter[torch.Size] = Counter()
    for state in optimizer.get("state", {}).values():
        shapes = {value.shape for value in state.values() if isinstance(value, Tensor) and value.dim()}
        if len(shapes) > 1:
            return None
        counts.update(shapes)
    return counts or None


class StateName(NamedTuple):
    """The name of a value in an optimizer's state dict.

    `optimizer` is the name of the state dict, "" at the top. `parameter` is the name of a parameter or of a group.
    `key` is `exp_avg`, `exp_avg_sq`, `step`, `lr`, ...
    """

    optimizer: str
    parameter: str
    key: str


def optimizer_states(names: Iterable[str]) -> dict[str, StateName]:
    """Find states and settings of optimizers among the names in a flattened state dict, of tensors and other objects.

    A name that ends like one of Adam's moments is a state even if there are no groups.
    """
    split_names = {name: name.split(".") for name in names}
    optimizers = {
        ".".join(keys[:i]) for keys in split_names.values() for i, key in enumerate(keys) if key == "param_groups"
    }
    states = {}
    for name, (*parents, last) in split_names.items():
        for depth, key in enumerate(parents):
            prefix = ".".join(parents[:depth])
            if key == "param_groups" or (key == "state" and (prefix in optimizers or last in MOMENTS)):
                states[name] = StateName(prefix, ".".join(parents[depth + 1 :]), last)
                break
    return states


def models(names: Iterable[str], paths: Mapping[str, Sequence[str | int]]) -> dict[str, dict[str, str]]:
    """Group the flattened names of weights and buffers by model.

    Returns for the name of each model's state dict ("" at the top) the flattened names by the names in that dict.
    `paths` are the keys from which DCP's planner joined each name. A name without an entry is at the top.
    """
    by_model: dict[str, dict[str, str]] = defaultdict(dict)
    for name in names:
        *prefix, last = paths.get(name, (name,))
        by_model[".".join(map(str, prefix))][str(last)] = name
    return dict(by_model)
