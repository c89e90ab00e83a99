"""How far weights move from save to save: measured against the anchor, or estimated from Adam's moments."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import LOSSY_DTYPES
from hf_trainweights.checkpoint.codecs.delta_uniform import rms_difference
from hf_trainweights.checkpoint.encoded.anchor import Anchor
from hf_trainweights.checkpoint.encoded.base_weights import BaseWeights
from hf_trainweights.checkpoint.encoded.key_paths import KeyPath
from hf_trainweights.checkpoint.encoded.plan import Plan, TensorPlan
from hf_trainweights.checkpoint.planning.modes import SIZE_FLOOR
from hf_trainweights.checkpoint.planning.optimizer_layout import is_number, is_optimizer_state

# near-lossless errs by rms / (4 * sqrt(12)) = rms / 13.9 of a delta at every save; rounding an anchor errs less.
_ROUNDING_SHARE = 1 / 16


def measure_delta_rms(weights: Mapping[str, Any], anchor: Anchor | BaseWeights) -> dict[str, float]:
    """Measure how far weights have moved from their anchor; this fixes the steps of the lossy modes.

    Args:
        weights: A flat state dict under module names.
        anchor: The anchor or base. One tensor of it is decoded at a time.

    Returns:
        Root mean square of the difference to the decoded anchor, by name, JSON; without weights that are small,
        not finite or of another shape. It serves as long as the anchor is used.

    Raises:
        CorruptFileError: The anchor is damaged.
    """
    measured = {}
    for name, tensor in weights.items():
        if not isinstance(tensor, Tensor) or tensor.numel() < SIZE_FLOOR:
            continue
        if tensor.dtype not in LOSSY_DTYPES or name not in anchor:
            continue
        reference = anchor.tensor(name)
        if reference.shape != tensor.shape:
            continue
        rms = rms_difference(tensor.cpu(), reference)
        if math.isfinite(rms):
            measured[name] = rms
    return measured


def expected_drift_rms(optimizer: Mapping[str, Any], names: Mapping[Any, str]) -> dict[str, float]:
    """Estimate from Adam's moments how far each weight moves between two saves: as far as since the start of the run.

    The estimate is |last update| * sqrt(steps): right for independent steps, too small for a steady drift.

    Args:
        optimizer: `optimizer.state_dict()`.
        names: Its parameters' names by their index in it.

    Returns:
        Root mean square by name, without parameters that have no name or no Adam state; empty for other optimizers.
    """
    drift: dict[str, float] = {}
    if not is_optimizer_state(optimizer):
        return drift
    for group in optimizer["param_groups"]:
        for index in group["params"]:
            state = optimizer["state"].get(index, {})
            if index in names and "betas" in group and _is_adams(state):
                drift[names[index]] = _adam_drift_rms(state, float(group["lr"]), group["betas"])
    return drift


def _is_adams(state: Mapping[str, Any]) -> bool:
    first, second = state.get("exp_avg"), state.get("exp_avg_sq")
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return False
    return first.shape == second.shape and is_number(state.get("step"))


def _adam_drift_rms(state: Mapping[str, Any], lr: float, betas: tuple[float, float]) -> float:
    steps = float(state["step"])
    first, second = state["exp_avg"], state["exp_avg_sq"]
    if steps < 1 or not first.numel():
        return 0.0
    squares = (first.float().square() / second.float()).nan_to_num_(0.0, 0.0, 0.0).mean().item()
    correction = (1 - betas[1] ** steps) / (1 - betas[0] ** steps) ** 2
    return lr * math.sqrt(max(squares * correction * steps, 0.0))  # a damaged second moment may be negative


def without_coarse_rounding(plan: Plan, weights: Mapping[str, Any], drift_rms: Mapping[str, float]) -> Plan:
    """Keep the rounding of a plan only where it errs less than near-lossless errs at every save.

    Training from scratch moves weights that far between two saves, a fine-tune does not.

    Args:
        plan: What `Policy.plan_full` returned.
        weights: The flat state dict that it plans.
        drift_rms: By name how far a weight moves between two saves; one without an entry is not rounded.

    Returns:
        A new plan.
    """
    kept: dict[KeyPath, TensorPlan] = {}
    for path, each in plan.items():
        limit = drift_rms.get(each.name, 0.0) * _ROUNDING_SHARE
        rounds = each.round_to is not None and limit and _rounding_rms(weights[each.name], each.round_to) <= limit
        kept[path] = each if rounds else dataclasses.replace(each, round_to=None)
    return kept


def _rounding_rms(weight: Tensor, dtype: torch.dtype) -> float:
    error = weight.detach().float() - weight.detach().to(dtype).float()
    return error.square().mean().sqrt().item()
