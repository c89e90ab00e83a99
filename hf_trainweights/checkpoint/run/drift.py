"""How far weights move from save to save: measured against the anchor, or estimated from Adam's moments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import LOSSY_DTYPES
from hf_trainweights.checkpoint.codecs.delta_uniform import rms_difference
from hf_trainweights.checkpoint.encoded.anchor import Anchor
from hf_trainweights.checkpoint.encoded.base_weights import BaseWeights
from hf_trainweights.checkpoint.planning.modes import SIZE_FLOOR
from hf_trainweights.checkpoint.planning.roles import is_number, is_optimizer_state

# Where saves lie further apart, or nobody knows how far, the estimate is too small: steps get finer, never too coarse.
_MOST_STEPS = 100


def measure_delta_rms(weights: Mapping[str, Any], anchor: Anchor | BaseWeights) -> dict[str, float]:
    """Return by name the rms of the difference of weights to their decoded anchor, which fixes lossy steps.

    Weights that are small, not finite or of another shape are left out. One tensor is decoded at a time.
    """
    measured = {}
    for name, tensor in weights.items():
        if isinstance(tensor, Tensor) and tensor.numel() >= SIZE_FLOOR and tensor.dtype in LOSSY_DTYPES:
            rms = delta_rms(tensor.cpu(), name, anchor)
            if rms is not None:
                measured[name] = rms
    return measured


def delta_rms(tensor: Tensor, name: str, anchor: Anchor | BaseWeights) -> float | None:
    """Return the rms of the difference of a weight or shard to the anchor's; None where it is none, or no number."""
    reference = anchor.tensor(name) if name in anchor else None
    if reference is None or reference.shape != tensor.shape:
        return None
    rms = rms_difference(tensor, reference)
    return rms if math.isfinite(rms) else None


def expected_drift_rms(
    optimizer: Mapping[str, Any], names: Mapping[Any, str], interval_steps: int | None = None
) -> dict[str, float]:
    """Estimate from Adam's moments by name the rms of how far each weight moves between two saves.

    Gradients count as independent. One gradient g moves a weight by lr * (1 - beta1**k) * g / sqrt(exp_avg_sq) within k
    steps, because Adam spreads it over the following ones. The root mean square of exp_avg is that of g times sqrt((1 -
    beta1) / (1 + beta1)). Measured in a language model from scratch and in a fine-tune, weights move 0.4 to 1.3 times
    as far: less while the learning rate falls. Of `interval_steps`, the training steps between two saves, at most 100
    count; default: those since the start. Parameters without a name or an Adam state are left out.
    """
    drift: dict[str, float] = {}
    most_steps = min(interval_steps or _MOST_STEPS, _MOST_STEPS)
    if not is_optimizer_state(optimizer):
        return drift
    for group in optimizer["param_groups"]:
        for index in group["params"]:
            state = optimizer["state"].get(index, {})
            if index in names and "betas" in group and _is_adams(state):
                drift[names[index]] = _adam_drift_rms(state, float(group["lr"]), group["betas"], most_steps)
    return drift


def second_moments(optimizer: Mapping[str, Any], names: Mapping[Any, str]) -> dict[str, Tensor]:
    """Return each parameter's `exp_avg_sq` by name, a hint for codecs, as far as the optimizer is Adam."""
    if not is_optimizer_state(optimizer):
        return {}
    states = {names[index]: state for index, state in optimizer["state"].items() if index in names}
    moments = {name: state["exp_avg_sq"] for name, state in states.items() if _is_adams(state)}
    return {name: moment for name, moment in moments.items() if moment.dtype in LOSSY_DTYPES}


def _is_adams(state: Mapping[str, Any]) -> bool:
    first, second = state.get("exp_avg"), state.get("exp_avg_sq")
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return False
    return first.shape == second.shape and is_number(state.get("step"))


def _adam_drift_rms(state: Mapping[str, Any], lr: float, betas: tuple[float, float], most_steps: int) -> float:
    steps = float(state["step"])
    first, second = state["exp_avg"], state["exp_avg_sq"]
    if steps < 1 or not first.numel():
        return 0.0
    squares = (first.float().square() / second.float()).nan_to_num_(0.0, 0.0, 0.0).mean().item()
    correction = (1 - betas[1] ** steps) / (1 - betas[0] ** steps) ** 2
    squares = max(squares, 0.0)  # a damaged second moment may be negative
    return lr * math.sqrt(squares * correction * _independent_updates(min(steps, most_steps), betas[0]))


def _independent_updates(steps: float, beta: float) -> float:
    """Return how many independent updates of the same size move a weight as far as so many steps with momentum."""
    within = steps - 2 * beta * (1 - beta**steps) / (1 - beta) + beta**2 * (1 - beta ** (2 * steps)) / (1 - beta**2)
    return within * (1 + beta) / (1 - beta)
