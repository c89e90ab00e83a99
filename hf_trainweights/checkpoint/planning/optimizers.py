"""Finds the class of an optimizer, and by the class the roles of its states: how each of them moves a weight.

A lossy mode may round a state only in the unit in which the optimizer uses it, so the class of the optimizer decides.
The names of states do not: Prodigy scales its `exp_avg` by an estimated rate, ADOPT divides gradients before it
averages them, RAdam does not divide by `exp_avg_sq` in its first steps, and all of them name their states as Adam does.
States of a class that is not in `RULES` stay exact.

Files that other packages wrote do not name the class. Then the settings in the parameter groups decide: only torch's
Adam and AdamW record exactly those of `_SETTINGS_OF_ADAM`, and maybe of `_LATER_SETTINGS`.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import LOSSY_DTYPES
from hf_trainweights.checkpoint.planning.roles import MOMENTS, is_optimizer_state

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UpdateRule:
    """How a class of optimizers moves a weight: roles by the keys of its states, and keys of states that stay exact.

    If a parameter has any other state, the optimizer moves it by another rule, e.g. Adam with `amsgrad`.
    """

    roles: Mapping[str, str]
    exact: frozenset[str]

    def fits(self, state: Mapping[Any, Any]) -> bool:
        """Return whether one parameter has the states of this rule, in dtypes that codecs can round."""
        tensors = [state.get(key) for key in self.roles]
        if not all(isinstance(tensor, Tensor) and tensor.dtype in LOSSY_DTYPES for tensor in tensors):
            return False
        shapes = {tensor.shape for tensor in tensors if isinstance(tensor, Tensor)}
        return len(shapes) == 1 and state.keys() <= self.roles.keys() | self.exact


# The key in a manifest's metadata under which `states_entry` is stored.
STATES_KEY = "optimizer"

ADAM = "torch.optim.adam.Adam"
# A group with the settings of Adam that plans need, for parameters that are known to be Adam's.
ADAM_GROUP: Mapping[str, Any] = {"lr": 0.0, "betas": (0.9, 0.999)}
_ADAM_RULE = UpdateRule({key: key for key in sorted(MOMENTS)}, frozenset({"step"}))

# Classes by module and name. apex counts steps in the group, and has no state `step`.
RULES: Mapping[str, UpdateRule] = {
    ADAM: _ADAM_RULE,
    "torch.optim.adamw.AdamW": _ADAM_RULE,
    "apex.optimizers.fused_adam.FusedAdam": _ADAM_RULE,
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": _ADAM_RULE,
    "deepspeed.ops.adam.fused_adam.FusedAdam": _ADAM_RULE,
}

# Wrappers, and the attribute in which each has the optimizer whose `step` it calls without changes.
_WRAPPERS = {
    "accelerate.optimizer.AcceleratedOptimizer": "optimizer",
    "accelerate.utils.deepspeed.DeepSpeedOptimizerWrapper": "optimizer",
    "deepspeed.runtime.bf16_optimizer.BF16_Optimizer": "optimizer",
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": "optimizer",
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": "optimizer",
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer": "optim",
}
# A subclass that replaces one of these methods moves weights by a rule of its own, or saves other states.
_METHODS_OF_A_RULE = ("step", "_init_group", "state_dict")

# Settings in a group of torch's Adam and AdamW: those of every version of torch, then later ones and schedulers'.
_SETTINGS_OF_ADAM = frozenset({"lr", "betas", "eps", "weight_decay", "amsgrad"})
_LATER_SETTINGS = frozenset(
    {"maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay", "params", "param_names"}
    | {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
)


def class_name(optimizer: Any) -> str | None:
    """Return module and name of an optimizer's class, or of its base class in `RULES` if it moves weights by that rule.

    A text is returned as it is, except that Adam and AdamW become torch's. None stays None.
    """
    if optimizer is None:
        return None
    if isinstance(optimizer, str):
        name = optimizer.removeprefix("torch.optim.")
        torchs = f"torch.optim.{name.lower()}.{name}"
        return torchs if torchs in RULES else optimizer
    own_name = _qualified(type(optimizer))
    if own_name in _WRAPPERS:
        return class_name(getattr(optimizer, _WRAPPERS[own_name]))
    base = next((cls for cls in type(optimizer).__mro__ if _qualified(cls) in RULES), None)
    return own_name if base is None or _replaces(type(optimizer), base) else _qualified(base)


def rule_of(name: str | None, settings: Collection[str]) -> UpdateRule | None:
    """Return the rule by which the parameters of a group are moved, or None if it is unknown.

    `name` is the optimizer's class, or None if that is unknown. `settings` are the keys of the group.
    """
    if "betas" not in settings:
        return None
    if name is not None:
        return RULES.get(name)
    is_adams = _SETTINGS_OF_ADAM <= set(settings) <= _SETTINGS_OF_ADAM | _LATER_SETTINGS
    return _ADAM_RULE if is_adams else None


def adam_states(
    optimizer: Mapping[str, Any], names: Mapping[Any, str], optimizer_class: str | None
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Yield name, state and group of each parameter in a state dict that Adam moves, even with `amsgrad`."""
    if not is_optimizer_state(optimizer):
        return
    for group in optimizer["param_groups"]:
        if rule_of(optimizer_class, group) is not _ADAM_RULE:
            continue
        for index in group["params"]:
            state = optimizer["state"].get(index, {})
            first, second = (state.get(key) for key in ("exp_avg", "exp_avg_sq"))
            if index not in names or not isinstance(first, Tensor) or not isinstance(second, Tensor):
                continue
            if first.shape == second.shape and not first.is_complex():
                yield names[index], state, group


def states_entry(
    optimizer_class: str | None, tensors: Sequence[Mapping[str, Any]], *, is_lossy: bool
) -> dict[str, Any]:
    """Return the entry under `STATES_KEY`: the class of an optimizer, and the roles of its states that were rounded.

    `tensors` are the rows of its states in a report. If a lossy mode has no rule for any of them, warn once per class.
    """
    if is_lossy and tensors and not any(row["role"] in MOMENTS for row in tensors):
        _say_that_states_stay_exact(optimizer_class)
    return {"class": optimizer_class, "rounded": sorted({row["role"] for row in tensors if row["bound"] is not None})}


def recorded_class(metadata: Mapping[str, Any]) -> str | None:
    """Return the class of an optimizer from a manifest's metadata, which anyone may have written; None if invalid."""
    entry = metadata.get(STATES_KEY)
    name = entry.get("class") if isinstance(entry, Mapping) else None
    return name if isinstance(name, str) else None


@functools.cache  # once per class
def _say_that_states_stay_exact(optimizer_class: str | None) -> None:
    if optimizer_class is None:
        advice = "If it is torch's Adam or AdamW, say so: optimizer='AdamW', on the command line --optimizer AdamW."
        _logger.warning("States of an optimizer whose class the checkpoint does not name stay exact. %s", advice)
    else:
        why = "the lossy modes round states of Adam and AdamW without amsgrad alone"
        _logger.warning("The states of %s stay exact: %s.", optimizer_class, why)


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _replaces(cls: type, base: type) -> bool:
    """Return whether a class replaces a method of its base's rule.

    Methods are unwrapped, because torch wraps `step` of each class when its first optimizer is made.
    """
    methods = ((getattr(cls, name, object), getattr(base, name, object)) for name in _METHODS_OF_A_RULE)
    return any(inspect.unwrap(own) is not inspect.unwrap(inherited) for own, inherited in methods)
