"""What the tensors of training state are: weights, buffers, and states of an optimizer, told from names and shapes.

torch.distributed.checkpoint (DCP) flattens nested dicts and joins the keys by dots. An optimizer is what has
`param_groups` beside `state`, as in `optim.state.layers.0.weight.exp_avg`, whether its own state dict was flat or not.
Everything else is a model's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from hf_trainweights.checkpoint.encoded.tree import Key

# Tensors of an optimizer's state that a mode treats by name; Adam keeps them for each parameter.
MOMENTS = frozenset({"exp_avg", "exp_avg_sq"})


def is_optimizer_state(tree: object) -> TypeGuard[dict[str, Any]]:
    """Return whether a tree has the layout of `optimizer.state_dict()`, so that nobody stumbles over another."""
    if not isinstance(tree, dict):
        return False
    states, groups = tree.get("state"), tree.get("param_groups")
    if not isinstance(states, Mapping) or not isinstance(groups, list):
        return False
    return all(isinstance(values, Mapping) for values in states.values()) and all(map(_is_group, groups))


def optimizer_parameter_names(model: nn.Module, optimizer: Any) -> dict[int, str]:
    """Return the names of an optimizer's parameters by the index under which its state dict knows them.

    Indices run through the groups in their order. Parameters of other modules are left out.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = getattr(optimizer, "param_groups", [])
    parameters = dict.fromkeys(id(parameter) for group in groups for parameter in group["params"])
    return {index: names[key] for index, key in enumerate(parameters) if key in names}


def is_number(value: object) -> bool:
    """Return whether a value is a number, or a tensor of one."""
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def recorded_names(optimizer: Mapping[str, Any]) -> dict[Key, str]:
    """Return the names that an optimizer made from `model.named_parameters()` records, by their parameter's index."""
    names: dict[Key, str] = {}
    for group in optimizer["param_groups"]:
        # A state that was gathered from several ranks has the names in the place of the indices.
        named = [each for each in group["params"] if isinstance(each, str)]
        names.update(zip(group["params"], group.get("param_names", named), strict=False))
    return names


def _is_group(group: object) -> bool:
    if not isinstance(group, Mapping):
        return False
    params, names = group.get("params"), group.get("param_names", [])
    if not isinstance(params, list) or not all(isinstance(each, int | str) for each in params):
        return False
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        return False
    if "betas" not in group:
        return True
    betas = group["betas"]  # Adam's
    if not isinstance(betas, tuple | list) or len(betas) != 2 or not is_number(group.get("lr")):
        return False
    return all(is_number(beta) and 0 <= beta < 1 for beta in betas)


def find_buffers(weights: Mapping[str, Any], optimizer: Mapping[str, Any]) -> set[str]:
    """Return the names of all tensors of a flat state dict that an optimizer's state does not show to be trained.

    By the names that an optimizer made from `model.named_parameters()` records. Else by shape: as many states as
    tensors of a shape are there if none of these is a buffer. Without states of the parameters' shapes (plain SGD,
    Adafactor, no optimizer) only tensors of two and more dimensions count as trained. A frozen weight is taken for a
    buffer, which costs nothing: an exact difference of what does not change is next to nothing.
    """
    tensors = {name: tensor for name, tensor in weights.items() if isinstance(tensor, Tensor)}
    # Tied weights have one state.
    places = {name: (tensor.data_ptr() or id(tensor), tensor.shape) for name, tensor in tensors.items()}
    trained = set(recorded_names(optimizer).values()) if optimizer else set()
    if trained and trained <= tensors.keys():
        trained_places = {places[name] for name in trained}
        return {name for name, place in places.items() if place not in trained_places}
    shapes = _state_shapes(optimizer)
    if shapes is None:
        return {name for name, tensor in tensors.items() if tensor.dim() < 2}
    found = Counter(shape for _, shape in set(places.values()))
    return {name for name, tensor in tensors.items() if found[tensor.shape] > shapes[tensor.shape]}


def _state_shapes(optimizer: Mapping[str, Any]) -> Counter[torch.Size] | None:
    """Count the parameters by shape; None if a state does not show its parameter's."""
    shapes: Counter[torch.Size] = Counter()
    for state in optimizer.get("state", {}).values():
        of_parameter = {value.shape for value in state.values() if isinstance(value, Tensor) and value.dim()}
        if len(of_parameter) > 1:
            return None
        shapes.update(of_parameter)
    return shapes or None


class StateName(NamedTuple):
    """The name of a value in an optimizer's state dict, which stands at `optimizer`, "" for the top.

    `parameter` may be a group's name; `key` is `exp_avg`, `exp_avg_sq`, `step`, `lr`, ...
    """

    optimizer: str
    parameter: str
    key: str


def optimizer_states(names: Iterable[str]) -> dict[str, StateName]:
    """Find the states and groups of optimizers by their names in a flattened state dict, objects included.

    Names that end like Adam's moments are of states even without groups.
    """
    parts = {name: name.split(".") for name in names}
    optimizers = {
        ".".join(each[:depth]) for each in parts.values() for depth, part in enumerate(each) if part == "param_groups"
    }
    found = {}
    for name, each in parts.items():
        for depth, part in enumerate(each[:-1]):
            prefix, key = ".".join(each[:depth]), each[-1]
            if part == "param_groups" or (part == "state" and (prefix in optimizers or key in MOMENTS)):
                found[name] = StateName(prefix, ".".join(each[depth + 1 : -1]), key)
                break
    return found


def models(names: Iterable[str], paths: Mapping[str, Sequence[str | int]]) -> dict[str, dict[str, str]]:
    """Sort the flattened names of weights and buffers by where their model's state dict stands, then own names.

    `paths` are the keys from which DCP's planner joined each name; one without an entry stands at the top, "".
    """
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name in names:
        *prefix, last = paths.get(name, (name,))
        found[".".join(map(str, prefix))][str(last)] = name
    return dict(found)
