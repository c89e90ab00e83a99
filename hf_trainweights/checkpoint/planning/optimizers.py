"""Finds the class of an optimizer, and by the class its rules: how each of its states moves a weight.

`update_rules` is the table of these rules. States of a class that is not in it stay exact.

Files that other packages wrote do not name the class. Then the settings in the parameter groups decide: only one class
records exactly those of a row of `_SETTINGS`, and maybe of `_LATER_SETTINGS`. RAdam, Adamax and Adadelta have no row,
because many classes of other packages have their settings.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from hf_trainweights.checkpoint.planning.roles import is_optimizer_state
from hf_trainweights.checkpoint.planning.update_rules import ADAM, ADAM_RULES, RULES, Rules

_logger = logging.getLogger(__name__)

# The key in a manifest's metadata under which `states_entry` is stored.
STATES_KEY = "optimizer"

# A group with the settings of Adam that plans need, for parameters that are known to be Adam's.
ADAM_GROUP: Mapping[str, Any] = {"lr": 0.0, "betas": (0.9, 0.999)}
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

# Settings in a group by class: those of every version of torch, then later ones and schedulers'.
_SETTINGS = {
    ADAM: {"lr", "betas", "eps", "weight_decay", "amsgrad"},
    "torch.optim.nadam.NAdam": {"lr", "betas", "eps", "weight_decay", "momentum_decay"},
    "torch.optim.rmsprop.RMSprop": {"lr", "momentum", "alpha", "eps", "centered", "weight_decay"},
    "torch.optim.adagrad.Adagrad": {"lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value"},
    "torch.optim.sgd.SGD": {"lr", "momentum", "dampening", "weight_decay", "nesterov"},
    "torch.optim.Muon": {
        *("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
    },
}
_LATER_SETTINGS = frozenset(
    {"maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay", "params", "param_names"}
    | {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
)


def class_name(optimizer: Any) -> str | None:
    """Return module and name of an optimizer's class, or of its base class in `RULES` if it moves weights by that rule.

    A text is returned as it is, except that the name of a class of torch gets its module. None stays None.
    """
    if optimizer is None:
        return None
    if isinstance(optimizer, str):
        name = optimizer.removeprefix("torch.optim.")
        torchs = (row for row in RULES if row.startswith("torch.") and row.endswith(f".{name}"))
        return next(torchs, optimizer)
    own_name = _qualified(type(optimizer))
    if own_name in _WRAPPERS:
        return class_name(getattr(optimizer, _WRAPPERS[own_name]))
    base = next((cls for cls in type(optimizer).__mro__ if _qualified(cls) in RULES), None)
    return own_name if base is None or _replaces(type(optimizer), base) else _qualified(base)


def rules_of(name: str | None, settings: Collection[str]) -> Rules:
    """Return the rules by which the parameters of a group are moved, none if the class is unknown.

    `name` is the optimizer's class, or None if that is unknown. `settings` are the keys of the group.
    """
    if name is None:
        keys = set(settings)
        name = next((row for row, own in _SETTINGS.items() if own <= keys <= own | _LATER_SETTINGS), "")
    return RULES.get(name, ())


def is_adam(name: str | None, settings: Collection[str]) -> bool:
    """Return whether Adam or AdamW moves the parameters of a group; the arguments are those of `rules_of`."""
    return "betas" in settings and rules_of(name, settings) is ADAM_RULES


def adam_states(
    optimizer: Mapping[str, Any], names: Mapping[Any, str], optimizer_class: str | None
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Yield name, state and group of each parameter in a state dict that Adam moves, even with `amsgrad`."""
    if not is_optimizer_state(optimizer):
        return
    for group in optimizer["param_groups"]:
        if not is_adam(optimizer_class, group) or len(group["betas"]) != 2:
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
    if is_lossy and tensors and all(row["role"] == "other" for row in tensors):
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
        advice = "Say which it is, such as optimizer='AdamW', on the command line --optimizer AdamW."
        _logger.warning("States of an optimizer whose class the checkpoint does not name stay exact. %s", advice)
    else:
        why = "no rule says how they move weights (see register_update_rule)"
        if optimizer_class in RULES:
            why = "they have other keys, shapes or dtypes than its rule"
        _logger.warning("The states of %s stay exact: %s.", optimizer_class, why)


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _replaces(cls: type, base: type) -> bool:
    """Return whether a class replaces a method of its base's rule.

    Methods are unwrapped, because torch wraps `step` of each class when its first optimizer is made.
    """
    methods = ((getattr(cls, name, object), getattr(base, name, object)) for name in _METHODS_OF_A_RULE)
    return any(inspect.unwrap(own) is not inspect.unwrap(inherited) for own, inherited in methods)
