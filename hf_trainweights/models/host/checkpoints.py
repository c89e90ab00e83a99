"""Between the tensors of a checkpoint and the parameters of a model, both ways.

On the way in stand the operations and converters that Transformers makes parameters with; on the way back its names,
its own code, and weights that lie elsewhere.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, modeling_utils
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging

from hf_trainweights.models.host import private, private_attribute, unsupported
from hf_trainweights.models.host.models import base_prefix, has_adapters
from hf_trainweights.tensor.guards import is_guard, name_for_transformers, name_in_file
from hf_trainweights.tensor.stored_names import parse_stored_name

try:
    from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter
except ImportError as error:
    raise unsupported("transformers.core_model_loading") from error

# A tensor of a checkpoint that is not loaded yet: its name there, and the function that loads it, or None where it is
# for another rank.
NamedLoad = tuple[str, Callable[[], Tensor | None]]

# Above the level of every message.
_NOTHING = 100

# What `save_pretrained` writes a safetensors file by, and what stands in its place in this thread.
_SAVE_FILE = "safe_save_file"
_save_file: ContextVar[Callable[..., None] | None] = ContextVar("save_file", default=None)


class QuantizerOp(ConversionOps):
    """An operation of a quantizer. Transformers copies it for every weight; the copies are one object."""

    # From 5.21 on Transformers casts the tensors of a quantized checkpoint, unless their operation has this attribute.
    hf_quantizer = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def merge(self, name: str, parts: Sequence[Sequence[NamedLoad]], model: Any) -> Tensor | None:
        """Return the parameter that is made of several tensors, or None to leave the merging to Transformers.

        `parts` has for each pattern of the converter the tensors that match it.
        """
        return None


class Converter(WeightConverter):
    """A converter that Transformers copies cheaply: its deep copy shares the patterns and has nothing collected.

    Transformers copies a converter, patterns and all, for every tensor of a checkpoint: a tenth of a reload.
    """

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = copy.copy(self)
        copied.collected_tensors, copied.layer_targets = defaultdict(list), defaultdict(set)
        return copied


class MergingConverter(Converter):
    """A converter of experts that offers them to the quantizer's operation one by one, before they are merged."""

    __slots__ = ()

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        """Collect a tensor together with its name in the checkpoint."""
        named: Any = (source_key, future)
        super().add_tensor(target_key, source_key, source_pattern, named)

    def convert(
        self, layer_name: str, model: Any = None, config: Any = None, hf_quantizer: Any = None, loading_info: Any = None
    ) -> dict[str, Any]:
        """Return the merged parameter: the one that the operation makes, else the one that Transformers makes."""
        collected: dict[str, list[Any]] = self.collected_tensors
        parts = [collected[pattern] for pattern in self.source_patterns if pattern in collected]
        operation = self.quantization_operation
        merged = operation.merge(layer_name, parts, model) if isinstance(operation, QuantizerOp) else None
        if merged is not None:
            collected.clear()
            return {layer_name: merged}
        for pattern, sources in collected.items():
            collected[pattern] = [load for _, load in sources]
        return super().convert(layer_name, model, config, hf_quantizer, loading_info)


def make_converter(
    source_patterns: list[str], target_pattern: str, operation: QuantizerOp, on_cpu: bool = False
) -> WeightConverter:
    """Return a converter that makes one parameter of several tensors; the patterns are the ends of their names.

    With `on_cpu` the operation gets the tensors on the CPU, wherever the parameter is to be.
    """
    return Converter(
        source_patterns=source_patterns, target_patterns=target_pattern, operations=[operation], force_cpu=on_cpu
    )


def offer_before_merging(conversion: Any) -> Any:
    """Return a converter that does the same as one of Transformers', but offers experts to the quantizer one by one.

    One that does anything but merge experts is returned itself.
    """
    if not merges_experts(conversion) or type(conversion) is not WeightConverter:
        return conversion
    converter = MergingConverter(
        source_patterns=list(conversion._original_source_patterns),
        target_patterns=list(conversion._original_target_patterns),
        operations=conversion.operations,
        force_cpu=conversion.force_cpu,
    )
    converter.scope_prefix, converter.base_model_prefix = conversion.scope_prefix, conversion.base_model_prefix
    return converter


def merges_experts(conversion: Any) -> bool:
    """Return whether a renaming or converter puts experts, which a checkpoint keeps one by one, into one parameter."""
    kinds = [(type(op), getattr(op, "dim", None)) for op in getattr(conversion, "operations", ())]
    return kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])


def drop_conversions(model: PreTrainedModel, operation: type[QuantizerOp]) -> None:
    """Make a model forget converters that it was loaded by, so that saving does not try to revert them."""
    conversions: Any = getattr(model, "_weight_conversions", None)
    if conversions is not None:
        kept = [c for c in conversions if not any(isinstance(op, operation) for op in getattr(c, "operations", ()))]
        model._weight_conversions = kept  # pyright: ignore[reportArgumentType]  (nn.Module takes any attribute)


def restore_merging(model: PreTrainedModel) -> None:
    """Let a float save of a model write experts one by one, as a save of a model that was never quantized does.

    Transformers reverts the conversions that a load has used, and a quantized checkpoint has its experts merged.
    """
    used: list[Any] = getattr(model, "_weight_conversions", None) or []
    merged = {name for conversion in used for name in conversion.target_patterns}
    of_class = private("conversion_mapping", "get_model_conversion_mapping")(model, add_legacy=False)
    missing = [each for each in of_class if merges_experts(each) and merged.isdisjoint(each.target_patterns)]
    model._weight_conversions = [*used, *missing]  # pyright: ignore[reportArgumentType]  (nn.Module takes any attribute)


def expect_unused(model: PreTrainedModel, name: str) -> None:
    """Keep Transformers from reporting a tensor of a checkpoint that no model has, by its name or the end of it."""
    model._keys_to_ignore_on_load_unexpected = {
        *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
        rf"(^|\.){re.escape(name)}$",
    }


def checkpoint_tensors(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors, or copies, as a checkpoint of a model has them: experts one by one, under their names there."""
    return private("core_model_loading", "revert_weight_conversion")(model, tensors)


def converted_names(module: nn.Module) -> set[str]:
    """Return the names in a model's files whose tensors are renamed, split, merged or transposed ones of the modules.

    There are none for a quantized model, whose `ModuleNames` undo all this, for one that saves its adapters alone, and
    for one that is none of Transformers.
    """
    if not isinstance(module, PreTrainedModel) or getattr(module, "hf_quantizer", None) or has_adapters(module):
        return set()
    state = _float_state(module)
    return {name for name, tensor in checkpoint_tensors(module, state).items() if state.get(name) is not tensor}


def renamed_tensors(module: nn.Module) -> dict[str, str]:
    """Return the module's name of each float tensor that a quantized model's files rename, by its name in the files.

    A tensor that they split, merge or transpose has none.
    """
    if not isinstance(module, PreTrainedModel) or not getattr(module, "hf_quantizer", None) or has_adapters(module):
        return {}
    state = _float_state(module)
    names = {id(tensor): name for name, tensor in state.items()}
    saved = {name: names.get(id(tensor), name) for name, tensor in checkpoint_tensors(module, state).items()}
    return {name: own for name, own in saved.items() if name != own}


def _float_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of a model on the meta device, but for those of a class of their own: quantized weights."""
    return {name: tensor.to("meta") for name, tensor in model.state_dict().items() if type(tensor) is Tensor}


class ModuleNames:
    """A load_state_dict pre-hook by which a model takes tensors that its own files rename, split or merge.

    A Trainer resumes by `model.load_state_dict(tensors, strict=False)`, shard by shard, and would otherwise leave these
    at their starting values. Tensors that make one together wait until all of them have come.
    """

    def __init__(self) -> None:
        # By the first tensor that is made of them: the converter, and the pattern and tensor by the name in files.
        self._waiting: dict[str, tuple[WeightConverter, dict[str, tuple[str, Any]]]] = {}

    def __call__(self, module: PreTrainedModel, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Replace tensors that no module has by those that a load from files makes of them, in place."""
        tensors = {key.removeprefix(prefix): tensor for key, tensor in state_dict.items() if key.startswith(prefix)}
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        names |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
        unknown, prefix_of_base = {name for name in tensors if _weight_of(name) not in names}, base_prefix(module)
        for conversions in _conversions_of(module) if unknown else ():
            for name in sorted(unknown, key=private("core_model_loading", "dot_natural_key")):
                target, converter, pattern = _made_of(name, tensors[name], conversions)
                # A load takes the base model's prefix away, or puts it there, where that makes a name of the model.
                others = (target.removeprefix(prefix_of_base), prefix_of_base + target) if converter is None else ()
                target = next((each for each in (target, *others) if _weight_of(each) in names), None)
                if target is None:
                    continue
                unknown.remove(name)
                tensor = state_dict.pop(prefix + name)
                if converter is None:
                    state_dict[prefix + target] = tensor
                    continue
                if target not in self._waiting:
                    self._waiting[target] = copy.deepcopy(converter), {}
                self._waiting[target][1][name] = pattern, tensor
            for target in self._complete(module, conversions):
                state_dict |= {prefix + name: tensor for name, tensor in self._convert(module, target).items()}

    def _complete(self, model: PreTrainedModel, conversions: Sequence[Any]) -> list[str]:
        """Return the waiting targets of which all tensors have come."""
        if not self._waiting:
            return []
        saved = checkpoint_tensors(model, _float_state(model))
        counts = Counter(_made_of(name, tensor, conversions)[0] for name, tensor in saved.items())
        return [target for target, (_, parts) in self._waiting.items() if len(parts) == counts[target]]

    def _convert(self, model: PreTrainedModel, target: str) -> dict[str, Tensor]:
        """Return the tensors that are made of those that waited for a target."""
        converter, parts = self._waiting.pop(target)
        for name in sorted(parts, key=private("core_model_loading", "dot_natural_key")):
            converter.add_tensor(target, name, *parts[name])
        made: dict[str, Any] = converter.convert(target, model=model, config=model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


def _weight_of(name: str) -> str:
    """Return the name of the weight that a tensor of a file belongs to, its own name if it is no stored tensor."""
    return (parse_stored_name(name) or (name,))[0]


def _conversions_of(model: PreTrainedModel) -> Iterator[list[Any]]:
    """Yield copies of the conversions that a save of a model reverts, then those of its class: they note their use."""
    used: list[Any] | None = getattr(model, "_weight_conversions", None)
    if used:
        yield copy.deepcopy(used)
    yield private("conversion_mapping", "get_model_conversion_mapping")(model)


def _made_of(name: str, tensor: Tensor, conversions: Sequence[Any]) -> tuple[str, WeightConverter | None, str]:
    """Return the first tensor that is made of one of a file, and if a converter makes it a new one and its pattern.

    Stored tensors of quantized weights, and guards, are renamed alone.
    """
    renamed = name_for_transformers(name) if is_guard(tensor) else name
    for renaming in conversions:
        if not isinstance(renaming, WeightConverter):
            renamed, _ = renaming.rename_source_key(renamed)
    if is_guard(tensor) or parse_stored_name(renamed):
        return name_in_file(renamed), None, ""
    for converter in conversions:
        if isinstance(converter, WeightConverter):
            target, pattern = converter.rename_source_key(renamed)
            if pattern is not None:
                return target, converter, pattern
    return renamed, None, ""


def names_not_saved(model: PreTrainedModel) -> set[str]:
    """Return the names in a model's state dict that Transformers leaves out of its files; none if it does not say."""
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())


def load_offloaded(model: PreTrainedModel, name: str) -> Tensor:
    """Return a parameter that accelerate keeps on another device or on the disk."""
    return private("integrations.accelerate", "load_offloaded_parameter")(model, name)


def read_by(
    quantizer: HfQuantizer,
    model: PreTrainedModel,
    files: Sequence[str | os.PathLike[str]],
    dtype: torch.dtype | None,
    conversions: Sequence[Any],
) -> None:
    """Let Transformers load a checkpoint into a model through another quantizer, on the CPU and without a report."""
    options = private("modeling_utils", "LoadStateDictConfig")(
        dtype=dtype,
        hf_quantizer=quantizer,
        weight_mapping=[offer_before_merging(copy.deepcopy(each)) for each in conversions],
        ignore_mismatched_sizes=True,
    )
    load = private_attribute(model, "_load_pretrained_model")
    finish = private_attribute(model, "_finalize_model_loading")
    verbosity = logging.get_verbosity()
    # What is missing or of another shape is reported by the load itself, and filled with its own random numbers.
    logging.set_verbosity(_NOTHING)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            report, _ = load(model, None, [str(file) for file in files], options)
            finish(model, options, report)
    finally:
        logging.set_verbosity(verbosity)


class _SaveFile:
    """Transformers' function in a module of its own, or what stands in its place in this thread."""

    def __init__(self, original: Callable[..., None]):
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        (_save_file.get() or self.original)(*args, **kwargs)


@contextlib.contextmanager
def writing_files_by(write: Callable[..., None]) -> Iterator[None]:
    """Let Transformers write the safetensors files of a save in this thread by a function like `save_file`."""
    original: Any = getattr(modeling_utils, _SAVE_FILE, None)
    if not isinstance(original, _SaveFile):
        setattr(modeling_utils, _SAVE_FILE, _SaveFile(original))
    token = _save_file.set(write)
    try:
        yield
    finally:
        _save_file.reset(token)


def save_remote_code(model: PreTrainedModel, directory: Path, config: Any) -> None:
    """Copy the files of a model's own code and name them in its configuration, which is changed."""
    private("dynamic_module_utils", "custom_object_save")(model, directory, config=config)
