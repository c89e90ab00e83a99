"""Measures weights before formats are chosen for a budget: the weights of a module in memory, or of a checkpoint.

Transformers itself reads the checkpoint as in the load that follows, by the same files, conversions and dtypes. Each
float weight is measured as it comes, and kept in int8 until a model of these has told which weights matter most.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_trainweights.errors import ConfigError, UnsupportedError
from hf_trainweights.files.spill import Spill
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.models.budget.allocation import Losses, check_loaded, relative_errors, rows_of, weights_to_allocate
from hf_trainweights.models.budget.sensitivity import random_tokens, sensitivities
from hf_trainweights.models.choosing.selection import Choices
from hf_trainweights.models.choosing.summary import Choice
from hf_trainweights.models.host.checkpoints import NamedLoad, read_by
from hf_trainweights.models.host.inputs import Batch, does_not_run
from hf_trainweights.models.host.ranks import is_loaded_by_ranks
from hf_trainweights.models.loading.conversion import LoadState, TrainWeightsQuantize, keep_in, rows_of_experts
from hf_trainweights.models.loading.stored_weights import StoredWeight
from hf_trainweights.tensor.modules import as_parameter, parameter_places, substituted
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# The format that weights have while a forward pass measures how much each one matters; it is exact enough for that.
# int4 would take half the memory, but a quarter of all the time of a budget: it is made in eight times that of int8.
MEASURED_IN = Int8()

_logger = logging.getLogger(__name__)


def measure_in_memory(
    choices: Choices, calibration: Iterable[Batch] | None, spill: Spill | None = None
) -> tuple[dict[str, Losses], dict[str, float]]:
    """Return the losses and the sensitivities of the weights of a loaded module, both as `allocate` takes them.

    If `calibration` is None, random tokens tell the sensitivities of a model that takes tokens. The int8 weights for
    this measurement go to `spill`; they stay in memory if it is None.
    """
    module, weights, losses = choices.module, weights_to_allocate(choices), {}
    for choice in weights:
        weight = choice.weight.detach()
        check_loaded(choice.name, weight)
        stored = weight.transpose(-1, -2) if choice.transposed else weight
        losses[choice.name] = relative_errors(choice.name, stored.shape, rows_of(stored), choices.config.for_target)
    with _as_measured(module, choices.summary.quantized, spill):
        if calibration is None:
            return losses, sensitivities_of_tokens(module, weights)
        try:
            return losses, sensitivities(module, weights, calibration)
        except Warning:
            raise
        except Exception as error:
            raise does_not_run(error) from error


def sensitivities_of_tokens(module: nn.Module, weights: Sequence[Choice]) -> dict[str, float]:
    """Return how much a relative error of each weight matters, measured with random tokens; empty if that fails."""
    try:
        return sensitivities(module, weights, random_tokens(module))
    except Exception as error:
        # A model that needs other inputs beside tokens may raise any error.
        _logger.warning("A random batch does not tell which weights matter (%r), so their sizes decide.", error)
        return {}


def _as_measured(
    module: nn.Module, choices: Sequence[Choice], spill: Spill | None
) -> contextlib.AbstractContextManager[None]:
    """Put weights in int8 into a module, as `measure_checkpoint` does, so that both find the same numbers."""
    floats = [choice for choice in choices if not isinstance(choice.weight, QuantizedTensor)]
    in_int8 = (replace(choice, format=MEASURED_IN) for choice in floats)
    made = ((choice.weight, as_parameter(keep_in(spill, choice.quantize(choice.weight)))) for choice in in_int8)
    return substituted(parameter_places(module), made)


def check_measurable(model: PreTrainedModel, files: Sequence[str]) -> None:
    """Check that one process loads the model, and from files."""
    if not files:
        next_step = "Load the float model, then call quantize_(model, config)."
        raise ConfigError("bits or size", "the files of a checkpoint", "a state dict", next_step)
    if is_loaded_by_ranks(model):
        next_step = "Quantize and save the model in one process; all ranks may then load what was saved."
        raise UnsupportedError("bits or size", "a load by one process", "a load by several ranks", next_step)


def measure_checkpoint(
    quantizer: Any, choices: Choices, files: Sequence[str | os.PathLike[str]], conversions: Sequence[Any]
) -> tuple[dict[str, Losses], dict[str, float]]:
    """Return the losses and the sensitivities of the weights of a checkpoint, both as `allocate` takes them.

    The model is on the meta device. Quantizer and model stay as they are.
    """
    copied = copy.deepcopy(choices)
    model: Any = copied.module
    to_allocate = weights_to_allocate(copied)
    measure = _Measure({choice.name for choice in to_allocate}, copied, quantizer.state.stored)
    measuring = copy.copy(quantizer)
    measuring.state, measuring.operation = measure.state, measure
    read_by(measuring, model, files, to_allocate[0].weight.dtype if to_allocate else None, conversions)
    if measure.state.error is not None:
        raise measure.state.error
    return measure.losses, sensitivities_of_tokens(model, to_allocate)


class _Measure(TrainWeightsQuantize):
    """Measures weights as they are loaded, and returns them in int8: enough to see how much each one matters.

    `to_allocate` names the weights whose formats are still to be chosen; `choices` has all weights to be quantized.
    """

    def __init__(self, to_allocate: Collection[str], choices: Choices, stored: Mapping[str, StoredWeight]):
        super().__init__(LoadState(MEASURED_IN))
        self.state.choices = {choice.name: replace(choice, format=MEASURED_IN) for choice in choices.summary.quantized}
        self.state.stored = stored
        self.to_allocate, self.target = to_allocate, choices.config.for_target
        self.losses: dict[str, Losses] = {}

    def quantize_one(self, name: str, weight: Tensor, model: Any) -> Any:
        """Measure a weight and return it in int8, or unchanged if it is not to be quantized."""
        if name in self.to_allocate and weight.shape == model.get_parameter_or_buffer(name).shape:
            stored = weight.transpose(-1, -2) if self.state.choices[name].transposed else weight
            self._measure(name, stored.shape, rows_of(stored))
        return super().quantize_one(name, weight, model)

    def merge(self, name: str, parts: Sequence[Sequence[NamedLoad]], model: Any) -> Any:
        """Measure experts before they are merged, and return them in int8; None for a float or transposed weight."""
        if name in self.to_allocate and not self.state.choices[name].transposed:
            shape = model.get_parameter_or_buffer(name).shape
            self._measure(name, shape, lambda numbers: rows_of_experts(name, shape, parts, numbers))
        return super().merge(name, parts, model)

    def _measure(self, name: str, shape: Sequence[int], rows: Any) -> None:
        losses = self.state.attempt(partial(relative_errors, name, shape, rows, self.target))
        if losses is not None:
            self.losses[name] = losses
