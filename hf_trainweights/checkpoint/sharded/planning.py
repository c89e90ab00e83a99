"""The plan of a sharded save: how each tensor is stored, decided once for all of its shards and sent to every rank.

A tensor is planned by its whole size, so the same tensors are exact as in a checkpoint of one process, however small
their shards are. The steps of the lossy modes are measured shard by shard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from hf_trainweights.checkpoint.dcp.roles import Paths, StateName, buffers_of, models, optimizer_states
from hf_trainweights.checkpoint.encoded.key_paths import Key
from hf_trainweights.checkpoint.encoded.plan import TensorPlan
from hf_trainweights.checkpoint.planning.delta_plan import DeltaPlan, LossyDelta
from hf_trainweights.checkpoint.planning.policy import Policy

# Tells the policy that the group may be Adam's; whether a state is, it tells from the names of its tensors.
_BETAS = (0.9, 0.999)


@dataclass(frozen=True)
class Order:
    """How the shards of one tensor are stored.

    Args:
        plan: The plan of the whole tensor; its references have to be those of the shard.
        lossy: What a lossy mode does instead where the shard moves between saves.
        state: Which state of an optimizer it is; None for a weight or buffer.
    """

    plan: TensorPlan
    lossy: LossyDelta | None = None
    state: StateName | None = None

    @property
    def is_lossless(self) -> bool:
        """Whether every element comes back as it is."""
        return DeltaPlan({(): self.plan}, {(): self.lossy} if self.lossy else {}).is_lossless

    def shard_plan(self, name: str, rms: float) -> TensorPlan:
        """Return the plan of a weight's shard by its name in the anchor.

        `rms` is how far it had moved at the first difference to the anchor, or may move from this one; 0 is exact.
        """
        exact = replace(self.plan, anchor=None if self.plan.anchor is None else name)
        return DeltaPlan({(): exact}, {(): self.lossy} if self.lossy else {}).with_steps({exact.name: rms})[()]


def plan_tensors(
    items: Iterable[WriteItem], paths: Paths, policy: Policy, buffers: Collection[str] | None, *, is_delta: bool
) -> dict[str, Order]:
    """Plan all tensors of a save, by their names in the flattened state dict; `items` are those of all ranks.

    `paths` are the keys from which DCP's planner made each name. ConfigError: a rule names no tensor.
    """
    items = list(items)
    tensors = {each.index.fqn: _meta(each) for each in items if each.tensor_data is not None}
    states = optimizer_states(each.index.fqn for each in items)
    by_model = models((name for name in tensors if name not in states), paths)
    parameters = {state.parameter for state in states.values()}
    policy.require_used([*(name for names in by_model.values() for name in names), *parameters])
    orders: dict[str, Order] = {}
    for names in by_model.values():
        orders |= _plan_model(names, tensors, parameters, policy, buffers, is_delta)
    return orders | _plan_states({name: each for name, each in states.items() if name in tensors}, tensors, policy)


def moments_together(plans: Sequence[SavePlan], orders: Mapping[str, Order]) -> list[SavePlan]:
    """Give each first moment that is stored in terms of the second to the rank that stores that one.

    Of states that several ranks hold, DCP may give the two to different ones.
    """
    ranks = {(item.index.fqn, item.index.offset): rank for rank, plan in enumerate(plans) for item in plan.items}
    lists: list[list[WriteItem]] = [[] for _ in plans]
    for rank, plan in enumerate(plans):
        for item in plan.items:
            order = orders.get(item.index.fqn)
            needs_second = order is not None and order.plan.exp_avg_sq is not None
            second = (f"{item.index.fqn}_sq", item.index.offset)
            lists[ranks.get(second, rank) if needs_second else rank].append(item)
    return [replace(plan, items=items) for plan, items in zip(plans, lists, strict=True)]


def _meta(item: WriteItem) -> Tensor:
    data = item.tensor_data
    assert data is not None  # the caller asks for tensors only
    return torch.empty(data.size, dtype=data.properties.dtype, device="meta")


def _plan_model(
    names: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    parameters: Collection[str],
    policy: Policy,
    buffers: Collection[str] | None,
    is_delta: bool,
) -> dict[str, Order]:
    weights = {name: tensors[flat_name] for name, flat_name in names.items()}
    exact = buffers_of({name: weight.dim() for name, weight in weights.items()}, parameters, buffers)
    if not is_delta:
        full = policy.plan_full(weights, buffers=exact)
        return {names[name]: Order(full.exact[name,], full.lossy.get((name,))) for name in weights}
    delta = policy.plan_delta(weights, weights, buffers=exact)
    return {names[name]: Order(delta.exact[name,], delta.lossy.get((name,))) for name in weights}


def _plan_states(states: Mapping[str, StateName], tensors: Mapping[str, Tensor], policy: Policy) -> dict[str, Order]:
    trees: dict[str, dict[str, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for name, state in states.items():
        trees[state.optimizer][state.parameter][state.key] = tensors[name]
    orders = {}
    for optimizer, tree in trees.items():
        groups = [{"params": list(tree), "lr": 0.0, "betas": _BETAS}]
        names: dict[Key, str] = {parameter: parameter for parameter in tree}
        plan = policy.plan_optimizer({"state": tree, "param_groups": groups}, names=names)
        for name, state in states.items():
            if state.optimizer == optimizer:
                orders[name] = Order(plan["state", state.parameter, state.key], state=state)
    return orders
