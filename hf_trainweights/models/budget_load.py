"""What formats lose of the weights of a checkpoint, measured before it is loaded, with one weight in memory at a time.

The checkpoint is read by Transformers itself, as it will be when it is loaded: the same files, conversions and dtypes.
Each weight is measured and dropped.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from hf_trainweights.models.budget_options import relative_errors, rows_of
from hf_trainweights.models.budget_plan import Losses, stored_shape, weight_of, weights_to_plan
from hf_trainweights.models.config import TrainWeightsConfig
from hf_trainweights.models.experts import rows_of_experts
from hf_trainweights.models.host.checkpoints import read_by
from hf_trainweights.models.host.converters import NamedLoad, QuantizerOp
from hf_trainweights.models.load_state import LoadState
from hf_trainweights.models.summary import Choice


def measure_checkpoint(
    model: PreTrainedModel,
    files: Sequence[str | os.PathLike[str]],
    conversions: Sequence[Any],
    config: TrainWeightsConfig,
    skip: Sequence[str],
    state: LoadState,
) -> dict[str, Losses]:
    """Return what each candidate loses of the weights of a checkpoint.

    Args:
        model: The model on the meta device; it stays as it is.
        files: The checkpoint's files.
        conversions: How Transformers turns the tensors in them into parameters.
        config: The configuration.
        skip: As for `choose`.
        state: What the operations of this load share; it keeps the first error.

    Returns:
        The losses by name of the weight; a weight that the checkpoint lacks is missing.

    Raises:
        TrainWeightsError: A weight cannot be quantized, or is not what config.json says.
        UnsupportedError: The installed Transformers is not supported.
    """
    copied = copy.deepcopy(model)
    weights = {choice.name: choice for choice in weights_to_plan(copied, config, skip)}
    measuring = _Measuring(config, weights, {name for name, _ in copied.named_parameters()}, state)
    # Transformers casts what is to be quantized to the dtype of the load, which these have too.
    for dtype in {weight_of(choice).dtype for choice in weights.values()}:
        read_by(measuring, copied, files, dtype, conversions)
    if state.error is not None:
        raise state.error
    return measuring.operation.losses


class _Measuring(HfQuantizer):
    """A quantizer that measures the weights it is given, and lets Transformers keep none."""

    def __init__(
        self, config: TrainWeightsConfig, weights: Mapping[str, Choice], parameters: set[str], state: LoadState
    ):
        super().__init__(config, pre_quantized=False)
        self.parameters = parameters
        self.operation = _Measure(weights, state)

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        """Return whether a tensor comes to the operation: all but buffers, so that no float weight stays in memory."""
        return param_name in self.parameters

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


class _Measure(QuantizerOp):
    """Measures weights as they are loaded.

    Args:
        weights: The weights to measure, by name.
        state: What the operations of this load share.
    """

    def __init__(self, weights: Mapping[str, Choice], state: LoadState):
        self.weights, self.state = weights, state
        self.losses: dict[str, Losses] = {}

    def convert(  # pyright: ignore[reportIncompatibleMethodOverride]  (the base names arguments that no caller passes)
        self, input_dict: dict[str, Any], model: Any = None, **_: Any
    ) -> dict[str, Tensor]:
        """Measure each entry whose format is to be chosen.

        Args:
            input_dict: Full parameter name to a tensor, or to a list of one.
            model: The model on the meta device.

        Returns:
            Full parameter name to a stand-in that takes no memory.
        """
        for name, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            choice = self.weights.get(name)
            if choice is not None and weight.shape == model.get_parameter_or_buffer(name).shape:
                stored = weight.transpose(-1, -2) if choice.transposed else weight
                self._measure(name, stored.shape, rows_of(stored))
        return {name: self.state.stand_in(model.get_parameter_or_buffer(name)) for name in input_dict}

    def merge(self, name: str, parts: Sequence[Sequence[NamedLoad]], model: Any) -> Tensor | None:
        """Measure experts before they are merged.

        Args:
            name: Full name of the merged weight.
            parts: The tensors that are concatenated, for each part one per expert.
            model: The model on the meta device.

        Returns:
            A stand-in; None where the layer keeps the merged weight transposed, which is measured as a whole.
        """
        choice = self.weights.get(name)
        if choice is not None and choice.transposed:
            return None
        if choice is not None:
            shape = stored_shape(choice)
            self._measure(name, shape, lambda numbers: rows_of_experts(name, shape, parts, numbers))
        return self.state.stand_in(model.get_parameter_or_buffer(name))

    def _measure(self, name: str, shape: Sequence[int], rows: Any) -> None:
        losses = self.state.attempt(lambda: relative_errors(name, shape, rows))
        if losses is not None:
            self.losses[name] = losses
