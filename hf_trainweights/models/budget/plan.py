"""A plan for a budget: from the weights of a module and what each format loses of them to a format for each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from hf_trainweights.errors import ConfigError, QuantizationError
from hf_trainweights.formats.base import Format
from hf_trainweights.models.budget.bytes import file_bytes, file_bytes_in, rest_bytes
from hf_trainweights.models.budget.choice import Option, choose_options, smallest_bytes
from hf_trainweights.models.budget.options import CANDIDATES, OF_TARGETS, candidates
from hf_trainweights.models.choosing.config import TrainWeightsConfig
from hf_trainweights.models.choosing.limit import Budget
from hf_trainweights.models.choosing.selection import OVERRIDE, choose
from hf_trainweights.models.choosing.summary import Choice
from hf_trainweights.models.host.models import tied_names
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# What each candidate loses of a weight, see `relative_errors`.
Losses = Mapping[Format, float]


@dataclass(frozen=True)
class Measurements:
    """What is known of the weights of a model.

    Args:
        losses: What each candidate loses of a weight, by its name; none for a weight that a checkpoint lacks.
        sensitivities: How much a relative error of each weight changes what the model returns, in any unit; of some
            weights or of all it may be missing.
    """

    losses: Mapping[str, Losses]
    sensitivities: Mapping[str, float]


def weights_to_plan(module: nn.Module, config: TrainWeightsConfig, skip: Sequence[str]) -> list[Choice]:
    """Return the weights whose formats a budget decides about."""
    chosen = _once(module, choose(module, config, skip).quantized)
    return [each for each in chosen if each.reason != OVERRIDE and not isinstance(weight_of(each), QuantizedTensor)]


def _once(module: nn.Module, choices: Sequence[Choice]) -> list[Choice]:
    """Return choices without those of weights that will be tied to others."""
    names, tied = {each.name for each in choices}, tied_names(module)
    return [each for each in choices if tied.get(each.name) not in names]


def weight_of(choice: Choice) -> Tensor:
    """Return the parameter that a choice is about."""
    return getattr(choice.module, choice.name.rpartition(".")[2])


def check_loaded(name: str, weight: Tensor) -> None:
    """Check that a weight is not on the meta device, where it has no values."""
    if weight.is_meta:
        expected, found = "a weight with values", "one on the meta device"
        raise QuantizationError(name, expected, found, "Load the weights, then quantize.")


def stored_shape(choice: Choice) -> tuple[int, ...]:
    """Return the shape `[*, N, K]` in which a weight is stored."""
    *lead, N, K = weight_of(choice).shape
    return (*lead, K, N) if choice.transposed else (*lead, N, K)


def plan(
    module: nn.Module, config: TrainWeightsConfig, skip: Sequence[str], measured: Measurements
) -> TrainWeightsConfig:
    """Return a configuration with a format for each weight of a module; ConfigError: no choice fits the budget."""
    assert config.budget is not None
    weights = weights_to_plan(module, config, skip)
    others = _others(module, config, skip, weights)
    count = sum(each.numel for each in (*weights, *others))
    if config.budget.size_bytes is not None:
        limit, size = config.budget.size_bytes, file_bytes_in
        fixed = rest_bytes(module, [each.name for each in weights]) + sum(map(file_bytes, others))
    else:
        limit, size = math.floor((config.budget.bits or 0) * count / 8), stored_bytes_in
        fixed = sum(each.bytes_after for each in others)
    matters = _importance(weights, measured.sensitivities)
    options = {
        each.name: [
            Option(form, size(each, form), matters[each.name] * measured.losses.get(each.name, {}).get(form, 0.0))
            for form in candidates(stored_shape(each), config.for_target)
        ]
        for each in weights
    }
    least = fixed + smallest_bytes(options)
    if least > limit:
        raise _too_small(config.budget, config.for_target, least, count)
    chosen = choose_options(options, limit - fixed)
    return config.planned({name: option.format for name, option in chosen.items()})


def _others(
    module: nn.Module, config: TrainWeightsConfig, skip: Sequence[str], weights: Sequence[Choice]
) -> list[Choice]:
    """Return the choices that count and are made already: of a size all; of bits those of weights.

    What no configuration would quantize does not count as bits, but what the user excepts does.
    """
    planned = {each.name for each in weights}
    others = [each for each in _once(module, choose(module, config, skip).tensors) if each.name not in planned]
    if config.budget is not None and config.budget.size_bytes is not None:
        return others
    plain = {each.name for each in choose(module, config.without_exceptions(), skip).quantized}
    return [each for each in others if each.format is not None or each.name in plain]


def stored_bytes_in(choice: Choice, form: Format) -> int:
    """Return what a weight takes in a format, scales included."""
    return form.stored_bytes(stored_shape(choice), weight_of(choice).dtype)


def _importance(weights: Sequence[Choice], measured: Mapping[str, float]) -> dict[str, float]:
    """Return how much a relative error of each weight matters beside the same error of the others.

    A weight of which that is not known, such as an embedding, counts by its size, like the median of the others; if it
    is known of none, by the root of its size: errors of small weights matter more than in proportion.
    """
    if not measured:
        return {each.name: math.sqrt(each.numel) for each in weights}
    density = statistics.median_low([measured[each.name] / each.numel for each in weights if each.name in measured])
    return {each.name: measured.get(each.name, density * each.numel) for each in weights}


def _too_small(budget: Budget, target: str | None, least: int, count: int) -> ConfigError:
    smallest = str(OF_TARGETS.get(target or "", CANDIDATES)[0])
    if budget.size_bytes is not None:
        where, found, expected = "size", f"{budget.size_bytes:,}", f"at least {least:,} bytes"
    else:
        bits = math.ceil(800 * least / count) / 100
        where, found, expected = "bits", f"{budget.bits}", f"at least {bits:.2f}"
    next_step = "Give as much, or let include_embeddings and fewer exceptions make the rest smaller."
    return ConfigError(where, f"{expected}, which the smallest formats take ({smallest})", found, next_step)
