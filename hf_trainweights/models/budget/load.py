"""What is to be known of the weights of a checkpoint before it is loaded, with one float weight in memory at a time.

The checkpoint is read by Transformers itself, as it will be when it is loaded: the same files, conversions and dtypes.
Each weight is measured, and kept in int8: a model of these tells which weights matter most, and is dropped then.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from hf_trainweights.models.budget.measure import MEASURED_IN, as_measured, sensitivities_of_tokens
from hf_trainweights.models.budget.options import relative_errors, rows_of
from hf_trainweights.models.budget.plan import Losses, Measurements, weight_of, weights_to_plan
from hf_trainweights.models.choosing.config import TrainWeightsConfig
from hf_trainweights.models.choosing.selection import choose
from hf_trainweights.models.choosing.summary import Choice
from hf_trainweights.models.host.checkpoints import read_by
from hf_trainweights.models.host.converters import NamedLoad, QuantizerOp
from hf_trainweights.models.loading.conversion import TrainWeightsQuantize
from hf_trainweights.models.loading.experts import quantize_experts, rows_of_experts
from hf_trainweights.models.loading.load_state import LoadState


def measure_checkpoint(
    model: PreTrainedModel,
    files: Sequence[str | os.PathLike[str]],
    conversions: Sequence[Any],
    config: TrainWeightsConfig,
    skip: Sequence[str],
    state: LoadState,
) -> Measurements:
    """Measure the weights that a checkpoint has, for a model on the meta device, which stays as it is."""
    copied = copy.deepcopy(model)
    planned = weights_to_plan(copied, config, skip)
    chosen = {choice.name: choice for choice in choose(copied, config, skip).quantized}
    measure = _Measure({each.name for each in planned}, chosen, state, config.for_target)
    read_by(_Measuring(config, measure), copied, files, weight_of(planned[0]).dtype if planned else None, conversions)
    if state.error is not None:
        raise state.error
    return Measurements(measure.losses, sensitivities_of_tokens(copied, planned))


class _Measuring(HfQuantizer):
    """A quantizer that measures the weights it is given, and keeps them in int8."""

    def __init__(self, config: TrainWeightsConfig, operation: _Measure):
        super().__init__(config, pre_quantized=False)
        self.operation = operation

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        """Return whether a tensor comes to the operation."""
        return param_name in self.operation.chosen

    def get_quantize_ops(self) -> QuantizerOp:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the operation that measures a weight."""
        return self.operation

    def is_serializable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return False: the model is dropped."""
        return False

    @property
    def is_trainable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """False: the model is dropped."""
        return False


class _Measure(TrainWeightsQuantize):
    """Measures weights as they are loaded, and returns them in int8: enough to see how much each one matters.

    `planned` names those whose formats are to be chosen; `chosen` holds these and all others that are to be quantized.
    """

    def __init__(self, planned: Collection[str], chosen: Mapping[str, Choice], state: LoadState, target: str | None):
        super().__init__(state)
        self.planned, self.chosen, self.target = planned, chosen, target
        self.losses: dict[str, Losses] = {}

    def quantize_one(self, name: str, weight: Tensor, model: Any) -> Any:
        """Measure a weight, and return it in int8; as it is where its format is not to be chosen."""
        choice, skeleton = self.chosen.get(name), model.get_parameter_or_buffer(name)
        if choice is None or weight.shape != skeleton.shape:
            return weight
        stored = weight.transpose(-1, -2) if choice.transposed else weight
        self._measure(name, stored.shape, rows_of(stored))
        return self.state.parameter_or_stand_in(skeleton, lambda: self.state.kept(as_measured(choice, weight)))

    def merge(self, name: str, parts: Sequence[Sequence[NamedLoad]], model: Any) -> Any:
        """Measure experts before they are merged; None if the weight stays float or its layer keeps it transposed."""
        choice = self.chosen.get(name)
        if choice is None or choice.transposed:
            return None
        skeleton = model.get_parameter_or_buffer(name)
        self._measure(name, skeleton.shape, lambda numbers: rows_of_experts(name, skeleton.shape, parts, numbers))
        make = partial(quantize_experts, name, skeleton.shape, MEASURED_IN, parts, spill=self.state.spill)
        return self.state.parameter_or_stand_in(skeleton, make)

    def _measure(self, name: str, shape: Sequence[int], rows: Any) -> None:
        if name in self.planned:
            losses = self.state.attempt(partial(relative_errors, name, shape, rows, self.target))
            if losses is not None:
                self.losses[name] = losses
