"""How weights become quantized while Transformers loads them: its ConversionOps, with the quantizer's choices.

An error inside an op would reach the user as an untyped "conversion" report at the end of the load. So the ops hand
typed errors to `LoadState.fail` and go on with a stand-in; the quantizer raises the first one when the load is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter

from hf_trainweights.errors import CorruptFileError, TrainWeightsError
from hf_trainweights.formats.base import Format
from hf_trainweights.quantized_tensor import QuantizedTensor
from hf_trainweights.selection import Choice
from hf_trainweights.state_dict import FORMAT_SUFFIX, TENSOR_SUFFIXES, stored_name, unflatten_weight


class LoadState:
    """What the ops of one load share.

    Args:
        default: The format that the configuration names.
    """

    def __init__(self, default: Format):
        self.default = default
        self.choices: dict[str, Choice] = {}
        self.error: TrainWeightsError | None = None

    def fail(self, error: TrainWeightsError) -> None:
        """Keep the first error of the load.

        Args:
            error: What went wrong.
        """
        self.error = self.error or error


class _SharedOp(ConversionOps):
    """An op that Transformers may copy for every weight without copying what the load shares."""

    # Transformers' get_new_dtype leaves the dtype of stored tensors alone where an op has an attribute of this name.
    hf_quantizer = True

    def __init__(self, state: LoadState):
        self.state = state

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class TrainWeightsQuantize(_SharedOp):
    """Quantizes float weights as they are loaded."""

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Tensor]:
        """Quantize each entry that the quantizer chose a format for.

        Args:
            input_dict: Full parameter name to a tensor, or to a list of one.
            kwargs: What else Transformers tells; not used.

        Returns:
            Full parameter name to a parameter.
        """
        del kwargs
        loaded = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        return {name: self._quantize(name, weight) for name, weight in loaded.items()}

    def _quantize(self, name: str, weight: Tensor) -> Tensor:
        choice = self.state.choices.get(name)
        if choice is None or choice.format is None or self.state.error is not None:
            return weight
        try:
            tensor = QuantizedTensor.quantize(weight, choice.format, choice.transposed, name)
        except TrainWeightsError as error:
            self.state.fail(error)
            return weight
        return nn.Parameter(tensor, requires_grad=False)


class TrainWeightsDeserialize(_SharedOp):
    """Puts a quantized weight together from its stored tensors."""

    def convert(
        self, input_dict: dict[str, Any], model: Any = None, full_layer_name: str = "", **kwargs: Any
    ) -> dict[str, Tensor]:
        """Build one weight.

        Args:
            input_dict: The name pattern of each stored tensor, e.g. `_weight_qdata`, to a list of one tensor.
            model: The model on the meta device; its parameter has the dtype that is asked for.
            full_layer_name: Full name of the weight.
            kwargs: What else Transformers tells; not used.

        Returns:
            Full parameter name to a parameter.
        """
        del kwargs
        skeleton = model.get_parameter_or_buffer(full_layer_name)
        leaf = full_layer_name.rpartition(".")[2]
        prefix = stored_name(leaf, "")
        tensors = {
            key.rpartition(".")[2].removeprefix(prefix): value[0] if isinstance(value, list) else value
            for key, value in input_dict.items()
        }
        try:
            weight = unflatten_weight(full_layer_name, tensors, skeleton.dtype, self.state.default)
            if weight.shape != skeleton.shape:
                raise CorruptFileError(
                    full_layer_name,
                    f"shape {tuple(skeleton.shape)}, as config.json has it",
                    f"{tuple(weight.shape)}",
                    "Weights and config.json belong to different models; download or save both again.",
                )
        except TrainWeightsError as error:
            self.state.fail(error)
            return {full_layer_name: nn.Parameter(torch.empty_like(skeleton, device="cpu"), requires_grad=False)}
        return {full_layer_name: nn.Parameter(weight, requires_grad=False)}


def deserialize_converters(state: LoadState, leaves: set[str]) -> list[WeightConverter]:
    """Return the converters that put stored tensors together.

    Args:
        state: What the ops share.
        leaves: Names that quantized parameters have in their modules, e.g. `weight`, `down_proj`.
    """
    suffixes = (*TENSOR_SUFFIXES, FORMAT_SUFFIX)
    return [
        WeightConverter(
            source_patterns=[stored_name(leaf, suffix) for suffix in suffixes],
            target_patterns=leaf,
            operations=[TrainWeightsDeserialize(state)],
        )
        for leaf in sorted(leaves)
    ]


class QuantizeThenMerge(WeightConverter):
    """Merges experts after quantizing them one by one, so that no merged float weight is ever in memory.

    Rows are quantized independently, so stacking and concatenating rows of codes gives the very same tensors.
    """

    __slots__ = ()

    @classmethod
    def wrap(cls, converter: WeightConverter) -> WeightConverter:
        """Return a converter that does the same with a smaller peak, or the converter itself where it cannot.

        Args:
            converter: One of Transformers' own converters.
        """
        kinds = [(type(op), getattr(op, "dim", None)) for op in converter.operations]
        if type(converter) is not WeightConverter or kinds not in (
            [(MergeModulelist, 0)],
            [(MergeModulelist, 0), (Concatenate, 1)],
        ):
            return converter
        wrapped = cls(
            source_patterns=list(converter._original_source_patterns),
            target_patterns=list(converter._original_target_patterns),
            operations=converter.operations,
            force_cpu=converter.force_cpu,
        )
        wrapped.scope_prefix, wrapped.base_model_prefix = converter.scope_prefix, converter.base_model_prefix
        return wrapped

    def convert(
        self, layer_name: str, model: Any = None, config: Any = None, hf_quantizer: Any = None, loading_info: Any = None
    ) -> dict[str, Any]:
        """Quantize and merge if the weight is to be quantized, else do what Transformers does.

        Args:
            layer_name: Full name of the merged parameter.
            model: The model on the meta device.
            config: Its configuration.
            hf_quantizer: The quantizer.
            loading_info: What Transformers keeps of the load.

        Returns:
            Full parameter name to a parameter.
        """
        operation = self.quantization_operation
        state = operation.state if isinstance(operation, TrainWeightsQuantize) else None
        choice = state.choices.get(layer_name) if state is not None and state.error is None else None
        if choice is None or choice.format is None or choice.transposed or loading_info is None:
            return super().convert(layer_name, model, config, hf_quantizer, loading_info)
        assert state is not None
        try:
            shape = model.get_parameter_or_buffer(layer_name).shape
            tensor = _merge(layer_name, shape, choice.format, self._experts())
        except TrainWeightsError as error:
            state.fail(error)
            tensor = torch.empty(model.get_parameter_or_buffer(layer_name).shape)
        return {layer_name: nn.Parameter(tensor, requires_grad=False)}

    def _experts(self) -> Iterator[list[Callable[[], Tensor]]]:
        """Yield, for each expert, how to load each of the weights that are concatenated along N."""
        collected = self.collected_tensors
        sources = [collected.pop(pattern) for pattern in self.source_patterns if pattern in collected]
        yield from map(list, zip(*sources, strict=True))


def _merge(
    name: str, shape: torch.Size, form: Format, experts: Iterator[list[Callable[[], Tensor]]]
) -> QuantizedTensor:
    merged: dict[str, Tensor] = {}
    dtype = torch.float32
    expert = -1
    for expert, parts in enumerate(experts):
        row = 0
        for load in parts:
            weight = load()
            stored = form.quantize(weight, f"{name}, expert {expert}")
            if not merged:
                dtype = weight.dtype
                merged = form.empty(shape, dtype, weight.device)
            for key, tensor in stored.items():
                merged[key][expert, row : row + weight.shape[0]].copy_(tensor)
            row += weight.shape[0]
    if expert + 1 != shape[0]:
        raise CorruptFileError(
            name, f"{shape[0]} experts", f"{expert + 1}", "A shard is missing; download or save the model again."
        )
    return QuantizedTensor(merged, form, shape, dtype)
