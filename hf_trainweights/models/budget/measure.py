"""What is to be known of the weights of a module in memory before formats are chosen for a budget."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from hf_trainweights.files.spill import Spill
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.models.budget.options import relative_errors, rows_of
from hf_trainweights.models.budget.plan import Measurements, check_loaded, weights_to_plan
from hf_trainweights.models.budget.sensitivity import Batch, does_not_run, random_tokens, sensitivities
from hf_trainweights.models.choosing.config import TrainWeightsConfig
from hf_trainweights.models.choosing.selection import choose
from hf_trainweights.models.choosing.summary import Choice
from hf_trainweights.models.loading.load_state import keep_in
from hf_trainweights.tensor.modules import as_parameter, parameter_places, put_parameter
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# In which weights stand while it is measured how much each one matters. int4 would take half the memory, but a quarter
# of all the time that a budget takes: it is made in eight times that of int8.
MEASURED_IN = Int8()

_logger = logging.getLogger(__name__)


def measure_in_memory(
    module: nn.Module,
    config: TrainWeightsConfig,
    calibration: Iterable[Batch] | None,
    spill: Spill | None = None,
) -> Measurements:
    """Measure the weights of a loaded module, with random tokens if there is no calibration and it takes such.

    `spill` takes the copy of the module that is measured with, memory if it is None.
    """
    weights, losses = weights_to_plan(module, config), {}
    for choice in weights:
        weight = choice.weight.detach()
        check_loaded(choice.name, weight)
        stored = weight.transpose(-1, -2) if choice.transposed else weight
        losses[choice.name] = relative_errors(choice.name, stored.shape, rows_of(stored), config.for_target)
    with _as_measured(module, choose(module, config).quantized, spill):
        if calibration is None:
            return Measurements(losses, sensitivities_of_tokens(module, weights))
        try:
            return Measurements(losses, sensitivities(module, weights, calibration))
        except Exception as error:
            raise does_not_run(error) from error


def sensitivities_of_tokens(module: nn.Module, weights: Sequence[Choice]) -> dict[str, float]:
    """Return how much a relative error of each weight matters, told from random tokens; empty where that fails."""
    try:
        return sensitivities(module, weights, random_tokens(module))
    except Exception as error:
        # A model may want other inputs beside tokens, and tells so by whatever error that leads to.
        _logger.warning("A random batch does not tell which weights matter (%r), so their sizes decide.", error)
        return {}


@contextlib.contextmanager
def _as_measured(module: nn.Module, choices: Sequence[Choice], spill: Spill | None) -> Iterator[None]:
    """Let a module have the weights that `measure_checkpoint` measures with, so that both find the same numbers."""
    places, changed = parameter_places(module), []
    try:
        for choice in choices:
            weight = choice.weight
            if not isinstance(weight, QuantizedTensor):
                changed.append((places[id(weight)], weight))
                # int8 is enough to see how much each weight matters.
                measured = QuantizedTensor.quantize(weight, MEASURED_IN, choice.transposed, choice.name)
                put_parameter(places[id(weight)], as_parameter(keep_in(spill, measured)))
        yield
    finally:
        for its_places, weight in changed:
            put_parameter(its_places, weight)
