"""How weights become quantized while Transformers loads them: its ConversionOps, with the quantizer's choices.

An error inside an op would reach the user as an untyped "conversion" report at the end of the load. So every op builds
its weight through `LoadState.build`, which keeps the first typed error; the quantizer raises it when the load is over.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter

from hf_trainweights.errors import CorruptFileError, TrainWeightsError
from hf_trainweights.formats.base import Format
from hf_trainweights.models.selection import Choice
from hf_trainweights.models.stored_weights import StoredWeight
from hf_trainweights.tensor.modules import as_parameter
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor
from hf_trainweights.tensor.stored_names import stored_name, stored_suffixes, unflatten_weight


class LoadState:
    """What the ops of one load share.

    Args:
        default: The format that the configuration names.
    """

    def __init__(self, default: Format):
        self.default = default
        self.choices: dict[str, Choice] = {}
        self.stored: Mapping[str, StoredWeight] = {}
        self.error: TrainWeightsError | None = None

    def build(self, skeleton: Tensor, make: Callable[[], QuantizedTensor]) -> nn.Parameter:
        """Return a weight, or once the load has failed a stand-in for it that takes no memory.

        Args:
            skeleton: The parameter of the model on the meta device.
            make: Builds the weight; a typed error that it raises is kept, with the file it is about.
        """
        if self.error is None:
            try:
                return as_parameter(make())
            except TrainWeightsError as error:
                where = f"{self._file(error.where)}: {error.where}"
                self.error = type(error)(where, error.expected, error.found, error.next_step)
                self.error.__cause__ = error
        stand_in = torch.zeros((), dtype=skeleton.dtype).expand(skeleton.shape)
        return nn.Parameter(stand_in, requires_grad=False)

    def _file(self, name: str) -> str:
        """Return the file that holds a weight; the directory where the checkpoint has it under another name."""
        if name in self.stored:
            return str(self.stored[name].file)
        files = sorted({weight.file for weight in self.stored.values()})
        return str(files[0] if len(files) == 1 else files[0].parent) if files else "state_dict"


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

    def convert(  # pyright: ignore[reportIncompatibleMethodOverride]  (the base names arguments that no caller passes)
        self, input_dict: dict[str, Any], model: Any = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Quantize each entry that the quantizer chose a format for.

        Args:
            input_dict: Full parameter name to a tensor, or to a list of one.
            model: The model on the meta device.
            kwargs: What else Transformers tells; not used.

        Returns:
            Full parameter name to a parameter.
        """
        del kwargs
        loaded = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        return {name: self._quantize(name, weight, model) for name, weight in loaded.items()}

    def _quantize(self, name: str, weight: Tensor, model: Any) -> Tensor:
        choice = self.state.choices.get(name)
        if choice is None or choice.format is None:
            return weight
        form, skeleton = choice.format, model.get_parameter_or_buffer(name)

        def make() -> QuantizedTensor:
            _check_shape(name, weight, skeleton.shape)
            return QuantizedTensor.quantize(weight, form, choice.transposed, name)

        return self.state.build(skeleton, make)


class TrainWeightsDeserialize(_SharedOp):
    """Puts a quantized weight together from its stored tensors."""

    def convert(  # pyright: ignore[reportIncompatibleMethodOverride]  (the base names arguments that no caller passes)
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
        prefix = stored_name(full_layer_name.rpartition(".")[2], "")
        tensors = {
            key.rpartition(".")[2].removeprefix(prefix): value[0] if isinstance(value, list) else value
            for key, value in input_dict.items()
        }

        def make() -> QuantizedTensor:
            weight = unflatten_weight(full_layer_name, tensors, skeleton.dtype, self.state.default)
            _check_shape(full_layer_name, weight, skeleton.shape)
            return weight

        return {full_layer_name: self.state.build(skeleton, make)}


def _check_shape(name: str, weight: Tensor, shape: torch.Size) -> None:
    """Check what Transformers does not: it takes a quantized weight of any shape."""
    if weight.shape != shape:
        raise _wrong_shape(name, tuple(shape), str(tuple(weight.shape)))


def _wrong_shape(name: str, shape: tuple[int, ...], found: str) -> CorruptFileError:
    return CorruptFileError(
        name,
        f"shape {shape}, as config.json has it",
        found,
        "Weights and config.json belong to different models; download or save both again.",
    )


class _OwnConverter(WeightConverter):
    """A converter whose deep copy is what Transformers makes one for: the same for another weight, nothing collected.

    Transformers copies one for every tensor of the file, patterns too: a tenth of a reload.
    """

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = copy.copy(self)
        copied.collected_tensors, copied.layer_targets = defaultdict(list), defaultdict(set)
        return copied


def deserialize_converters(state: LoadState, leaves: set[str]) -> list[WeightConverter]:
    """Return the converters that put stored tensors together.

    Args:
        state: What the ops share.
        leaves: Names that quantized parameters have in their modules, e.g. `weight`, `down_proj`.
    """
    suffixes = stored_suffixes()
    return [
        _OwnConverter(
            source_patterns=[stored_name(leaf, suffix) for suffix in suffixes],
            target_patterns=leaf,
            operations=[TrainWeightsDeserialize(state)],
        )
        for leaf in sorted(leaves)
    ]


class QuantizeThenMerge(_OwnConverter):
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

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        """Collect a source tensor with its name in the checkpoint.

        Args:
            target_key: Full name of the merged parameter.
            source_key: Name in the checkpoint.
            source_pattern: Which of the converter's patterns that name matches.
            future: How to load the tensor.
        """
        named: Any = (source_key, future)
        super().add_tensor(target_key, source_key, source_pattern, named)

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
        collected: dict[str, list[Any]] = self.collected_tensors
        operation = self.quantization_operation
        state = operation.state if isinstance(operation, TrainWeightsQuantize) else None
        choice = state.choices.get(layer_name) if state is not None else None
        if state is None or choice is None or choice.format is None or choice.transposed:
            for pattern, sources in collected.items():
                collected[pattern] = [future for _, future in sources]
            return super().convert(layer_name, model, config, hf_quantizer, loading_info)
        form, skeleton = choice.format, model.get_parameter_or_buffer(layer_name)
        sources = [collected.pop(pattern) for pattern in self.source_patterns if pattern in collected]
        return {layer_name: state.build(skeleton, lambda: _merge(layer_name, skeleton.shape, form, sources))}


def _merge(name: str, shape: torch.Size, form: Format, sources: list[list[Any]]) -> QuantizedTensor:
    """Return the weight `[E, N, K]` from the parts that are concatenated along N, each a list over experts."""
    E, N, K = shape
    if any(len(part) != E for part in sources):
        counts = " and ".join(str(len(part)) for part in sources)
        raise CorruptFileError(
            name, f"{E} experts", counts, "A shard is missing; download or save the model and its config.json again."
        )
    merged: dict[str, Tensor] = {}
    dtype = torch.float32
    for expert in range(E):
        named = [(source_name, load()) for source_name, load in (part[expert] for part in sources)]
        shapes = [tuple(weight.shape) for _, weight in named]
        if {size[1:] for size in shapes} != {(K,)} or sum(size[0] for size in shapes) != N:
            names = " and ".join(source_name for source_name, _ in named)
            raise _wrong_shape(names, (N, K), " and ".join(map(str, shapes)))
        row = 0
        for source_name, weight in named:
            stored = form.quantize(weight, source_name)
            if not merged:
                dtype = weight.dtype
                merged = form.empty(shape, dtype, weight.device)
            for key, tensor in stored.items():
                merged[key][expert, row : row + weight.shape[0]].copy_(tensor)
            row += weight.shape[0]
    return QuantizedTensor(merged, form, shape, dtype)
