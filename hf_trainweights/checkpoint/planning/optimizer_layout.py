"""Whether a tree has the layout of `optimizer.state_dict()`, and the names of parameters that it records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from torch import Tensor, nn

from hf_trainweights.checkpoint.encoded.key_paths import Key


def is_optimizer_state(tree: object) -> TypeGuard[dict[str, Any]]:
    """Return whether a tree has the layout of `optimizer.state_dict()`, so that nobody stumbles over another.

    Examples:
        >>> import torch
        >>> is_optimizer_state(torch.optim.SGD([torch.ones(1)]).state_dict()), is_optimizer_state({"state": 1})
        (True, False)
    """
    if not isinstance(tree, dict):
        return False
    states, groups = tree.get("state"), tree.get("param_groups")
    if not isinstance(states, Mapping) or not isinstance(groups, list):
        return False
    return all(isinstance(values, Mapping) for values in states.values()) and all(map(_is_group, groups))


def optimizer_parameter_names(model: nn.Module, optimizer: Any) -> dict[int, str]:
    """Return the names of an optimizer's parameters by the index under which its state dict knows them.

    Indices run through the groups in their order. Parameters of other modules are left out.

    Examples:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer_parameter_names(model, torch.optim.SGD([model.bias, model.weight]))
        {0: 'bias', 1: 'weight'}
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
    return "betas" not in group or _are_adams(group)


def _are_adams(group: Mapping[str, Any]) -> bool:
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2 or not is_number(group.get("lr")):
        return False
    return all(is_number(beta) and 0 <= beta < 1 for beta in betas)
