"""Between the tensors of a checkpoint and the parameters of a model, both ways.

On the way in stand the operations and converters that Transformers makes parameters with; on the way back its names,
its own code, and weights that lie elsewhere.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel, modeling_utils
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging

from hf_trainweights.models.host import private, private_attribute, unsupported
from hf_trainweights.models.host.renaming import conversions_of_class, renames_float_alone, without

try:
    from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter
except ImportError as error:
    raise unsupported("transformers.core_model_loading") from error

# A tensor of a checkpoint that is not loaded yet: its name there, and the function that loads it, or None where it is
# for another rank.
NamedLoad = tuple[str, Callable[[], Tensor | None]]

MISSING = "is missing"
"""What `names_of_load` says of a parameter that is not in a checkpoint."""

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


class StoredConverter(Converter):
    """A converter of the stored tensors of quantized weights; it asks a function for the parameter of each."""

    __slots__ = ("find",)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the parameter that a stored tensor belongs to, and the pattern under which it is collected.

        This does not count as a use: a save reverts what was used, and this converter has no inverse.
        """
        found = self.find(source_key)
        return (source_key, None) if found is None else (found[0], _pattern(found[1]))


def make_converter(
    find: Callable[[str], tuple[str, str] | None],
    suffixes: Iterable[str],
    operation: QuantizerOp,
    on_cpu: bool = False,
) -> WeightConverter:
    """Return a converter that makes one parameter of several tensors, as `find` tells parameter and suffix of each.

    With `on_cpu` the operation gets the tensors on the CPU, wherever the parameter is to be.
    """
    patterns = [_pattern(suffix) for suffix in suffixes]
    converter = StoredConverter(patterns, "weight", operations=[operation], force_cpu=on_cpu)
    converter.find = find
    return converter


def _pattern(suffix: str) -> str:
    # Patterns are keys as well. This one is no name, nor a pattern of a model.
    return f":{suffix}"


def collected_by_suffix(collected: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a converter of `make_converter` has collected, by suffix; a guard, which has a name, is left out."""
    return {key[1:]: value for key, value in collected.items() if key.startswith(":")}


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


def restore_conversions(model: PreTrainedModel, quantized: Collection[str]) -> None:
    """Let a float save of a model write what a save of a model that was never quantized does, such as single experts.

    Transformers reverts the conversions that a load has used. A quantized checkpoint uses no converter for its weights,
    nor a renaming that fits the name of a float weight alone.
    """
    used: list[Any] = getattr(model, "_weight_conversions", None) or []
    of_class = conversions_of_class(model)
    unused = without(of_class, used)
    hidden = [each for each in unused if isinstance(each, WeightConverter) or renames_float_alone(each, quantized)]
    model._weight_conversions = [  # pyright: ignore[reportArgumentType]  (nn.Module takes any attribute)
        *without(used, of_class),
        *(each for each in of_class if each in hidden or each not in unused),
    ]


def expect_unused(model: PreTrainedModel, name: str) -> None:
    """Keep Transformers from reporting a tensor of a checkpoint that no model has, by its name or the end of it."""
    model._keys_to_ignore_on_load_unexpected = {
        *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
        rf"(^|\.){re.escape(name)}$",
    }


def checkpoint_tensors(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors, or copies, as a checkpoint of a model has them: experts one by one, under their names there."""
    return private("core_model_loading", "revert_weight_conversion")(model, tensors)


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


def names_of_load(model: PreTrainedModel, tensors: Mapping[str, Tensor], conversions: Sequence[Any]) -> dict[str, str]:
    """Return for each name that a load of tensors into a skeleton gets wrong what is wrong with it.

    All are on the meta device, so only names and shapes are compared.
    """
    load = private("core_model_loading", "convert_and_load_state_dict_in_model")
    options = private("modeling_utils", "LoadStateDictConfig")(
        device_map={"": "meta"}, weight_mapping=conversions, ignore_mismatched_sizes=True
    )
    shows_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        report, _ = load(model, dict(tensors), options)
    finally:
        if shows_progress:
            logging.enable_progress_bar()
    private_attribute(model, "_adjust_missing_and_unexpected_keys")(report)
    return {
        **dict.fromkeys(set(report.missing_keys) - names_not_saved(model), MISSING),
        **dict.fromkeys(report.unexpected_keys, "is none of the model's"),
        **{name: "has another shape" for name, *_ in report.mismatched_keys},
        **dict.fromkeys(report.conversion_errors, "cannot be put together"),
    }


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
