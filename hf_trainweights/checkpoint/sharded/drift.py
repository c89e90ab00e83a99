"""How far a shard of a weight moves between saves, estimated from the optimizer's states that the rank has at hand."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem

from hf_trainweights.checkpoint.directory.drift import expected_drift_rms
from hf_trainweights.checkpoint.sharded.rank_items import RankItems
from hf_trainweights.checkpoint.sharded.roles import StateName

_FIELDS = ("lr", "betas")


def expected_shard_drift_rms(rank: RankItems, item: WriteItem) -> float | None:
    """Estimate from Adam's moments how far a shard moves between two saves.

    Args:
        rank: The items of the rank that stores it.
        item: The shard of a weight.

    Returns:
        The root mean square; None where the rank does not have both moments, the step and the group.
    """
    name = rank.orders.orders[item.index.fqn].plan.name
    state: dict[str, Any] = {}
    found: StateName | None = None
    for each in rank.at_hand:
        order = rank.order(each)
        if order is None or order.state is None or order.state.parameter != name:
            continue
        if order.state.key == "step" or each.index.offset == item.index.offset:
            state[order.state.key] = rank.tensor(each)
            found = order.state
    if found is None:
        return None
    group = _group(rank, found)
    if not group.keys() >= set(_FIELDS):
        return None
    tree = {"state": {name: state}, "param_groups": [{**group, "params": [name]}]}
    return expected_drift_rms(tree, {name: name}).get(name)


def _group(rank: RankItems, state: StateName) -> dict[str, Any]:
    """Return learning rate and betas of a parameter's group, as far as the rank has them.

    By DCP's names the group is in the list `param_groups`, or at `param_groups.0`, or at `param_groups.<parameter>`.
    """
    prefix = f"{state.optimizer}.param_groups" if state.optimizer else "param_groups"
    items = {item.index.fqn: item for item in rank.at_hand if item.index.fqn.startswith(prefix)}
    if prefix in items:
        groups = _load(rank, items[prefix])
        return next((each for each in groups if _has_parameter(each, state.parameter)), {})
    number = 0
    while f"{prefix}.{number}.params" in items:
        if state.parameter in map(str, _load(rank, items[f"{prefix}.{number}.params"])):
            return _fields(rank, items, f"{prefix}.{number}")
        number += 1
    return _fields(rank, items, f"{prefix}.{state.parameter}")


def _has_parameter(group: object, parameter: str) -> bool:
    return isinstance(group, Mapping) and parameter in map(str, group.get("params", ()))


def _fields(rank: RankItems, items: Mapping[str, WriteItem], group: str) -> dict[str, Any]:
    return {field: _load(rank, items[f"{group}.{field}"]) for field in _FIELDS if f"{group}.{field}" in items}


def _load(rank: RankItems, item: WriteItem) -> Any:
    if item.tensor_data is not None:
        return rank.tensor(item)
    return torch.load(io.BytesIO(rank.data(item)), weights_only=True)
