"""The plan of any file, made from the shape of its content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from hf_trainweights.checkpoint.encoded.key_paths import Key
from hf_trainweights.checkpoint.encoded.plan import Plan, TensorPlan
from hf_trainweights.checkpoint.planning.policy import Policy


def plan_tree(tree: Any, policy: Policy, optimizer_names: Mapping[Key, str] | None = None) -> Plan:
    """Plan a tree by what it looks like: an optimizer's state, a module's, or a dict of those; the rest is exact.

    ConfigError: a rule selects optimizer states by name, and there are no names.
    """
    if not isinstance(tree, dict):
        return {}
    if tree.keys() >= {"state", "param_groups"}:
        return policy.plan_optimizer(tree, names=optimizer_names or None)
    if tree and all(isinstance(value, Tensor) for value in tree.values()):
        return policy.plan_weights(tree)
    plan: dict[Any, TensorPlan] = {}
    for key, value in tree.items():
        for path, each in plan_tree(value, policy).items():
            moment = (key, *each.exp_avg_sq) if each.exp_avg_sq else None
            plan[(key, *path)] = replace(each, exp_avg_sq=moment)
    return plan
