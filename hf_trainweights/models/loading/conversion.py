"""How weights become quantized while Transformers loads them: the quantizer's operations.

Every operation makes its weight through `LoadState.parameter_or_stand_in`, so that a typed error survives the load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.models.host.checkpoints import NamedLoad, QuantizerOp, make_converter
from hf_trainweights.models.loading.experts import quantize_experts, wrong_shape
from hf_trainweights.models.loading.load_state import LoadState, keep_in
from hf_trainweights.tensor.coded_weights import CODED_FLOAT_SUFFIX, CODED_SUFFIX
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor
from hf_trainweights.tensor.stored_names import stored_name, stored_suffixes, unflatten_weight


class TrainWeightsQuantize(QuantizerOp):
    """Quantizes float weights as they are loaded."""

    def __init__(self, state: LoadState):
        self.state = state

    def convert(  # pyright: ignore[reportIncompatibleMethodOverride]  (the base names arguments that no caller passes)
        self, input_dict: dict[str, Any], model: Any = None, **_: Any
    ) -> dict[str, Any]:
        """Quantize each entry, a tensor or a list of one, that the quantizer chose a format for."""
        loaded = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        return {name: self.quantize_one(name, weight, model) for name, weight in loaded.items()}

    def quantize_one(self, name: str, weight: Tensor, model: Any) -> Any:
        """Quantize a weight, or return it as it is where no format was chosen for it."""
        choice = self.state.choices.get(name)
        if choice is None or choice.format is None:
            return weight
        form, skeleton = choice.format, model.get_parameter_or_buffer(name)

        def make() -> Tensor:
            _check_shape(name, weight, self.state.shape_read(name, skeleton))
            made = keep_in(self.state.spill, QuantizedTensor.quantize(weight, form, choice.transposed, name))
            return self.state.own_part(name, made, skeleton)

        return self.state.parameter_or_stand_in(skeleton, make)

    def merge(self, name: str, parts: Sequence[Sequence[NamedLoad]], model: Any) -> Any:
        """Quantize experts before they are merged; None if the weight stays float or its layer keeps it transposed."""
        choice = self.state.choices.get(name)
        if choice is None or choice.format is None or choice.transposed:
            return None
        form, skeleton = choice.format, model.get_parameter_or_buffer(name)
        shape = self.state.shape_read(name, skeleton)

        def make() -> Tensor:
            made = quantize_experts(name, shape, form, parts, len(skeleton), self.state.spill)
            return self.state.own_part(name, made, skeleton)

        return self.state.parameter_or_stand_in(skeleton, make)


class TrainWeightsDeserialize(QuantizerOp):
    """Puts a quantized weight together from its stored tensors."""

    def __init__(self, state: LoadState):
        self.state = state

    def convert(  # pyright: ignore[reportIncompatibleMethodOverride]  (the base names arguments that no caller passes)
        self, input_dict: dict[str, Any], model: Any = None, full_layer_name: str = "", **_: Any
    ) -> dict[str, Any]:
        """Build one weight from its stored tensors: lists of one under patterns such as `_weight_qdata`."""
        skeleton = model.get_parameter_or_buffer(full_layer_name)
        prefix = stored_name(full_layer_name.rpartition(".")[2], "")
        tensors = {
            key.rpartition(".")[2].removeprefix(prefix): value[0] if isinstance(value, list) else value
            for key, value in input_dict.items()
            if key.rpartition(".")[2].startswith(prefix)  # else it is the weight's guard
        }

        def make() -> Tensor:
            shape = self.state.shape_read(full_layer_name, skeleton)
            weight = unflatten_weight(full_layer_name, tensors, skeleton.dtype, self.state.default, shape)
            _check_shape(full_layer_name, weight, shape)
            # All else is a view of the file.
            weight = (
                keep_in(self.state.spill, weight) if tensors.keys() & {CODED_SUFFIX, CODED_FLOAT_SUFFIX} else weight
            )
            return self.state.own_part(full_layer_name, weight, skeleton)

        return {full_layer_name: self.state.parameter_or_stand_in(skeleton, make)}


def deserialize_converters(state: LoadState, leaves: set[str], cut_on_cpu: bool = False) -> list[Any]:
    """Return the converters that put stored tensors together, for parameters such as `weight` and `down_proj`.

    With `cut_on_cpu` tensors are read to the CPU, where they are views of the file, before a rank's part of them is
    moved to its device.
    """
    suffixes = stored_suffixes()
    return [
        make_converter(
            [stored_name(leaf, suffix) for suffix in suffixes], leaf, TrainWeightsDeserialize(state), cut_on_cpu
        )
        for leaf in sorted(leaves)
    ]


def _check_shape(name: str, weight: Tensor, shape: torch.Size) -> None:
    # Transformers up to 5.22 takes a quantized weight of any shape.
    if weight.shape != shape:
        raise wrong_shape(name, tuple(shape), str(tuple(weight.shape)))
