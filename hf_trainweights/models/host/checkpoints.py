"""The tensors of a checkpoint and the parameters of a model: one made from the other by Transformers' loads and saves.

A load uses the operations and converters of this module. A save uses its functions to name and convert tensors, fetch
offloaded weights, write files and copy a model's own code.
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

# A tensor of a checkpoint that is not loaded yet: its name there, and the function that loads it. The function returns
# None if the tensor is for another rank.
NamedLoad = tuple[str, Callable[[], Tensor | None]]

MISSING = "is missing"
"""The problem that `names_of_load` reports of a parameter that is not in a checkpoint."""

# A log level above that of every message.
_SILENT = 100

# The function of Transformers that writes each safetensors file of a save, and its replacement in this thread.
_SAVE_FILE = "safe_save_file"
_save_file: ContextVar[Callable[..., None] | None] = ContextVar("save_file", default=None)


class QuantizerOp(ConversionOps):
    """An operation of a quantizer. Transformers deep-copies it for every weight, and gets the same object each time."""

    # Transformers 5.21 and newer cast the tensors of a quantized checkpoint if their operation lacks this attribute.
    hf_quantizer = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def merge(self, name: str, parts: Sequence[Sequence[NamedLoad]], model: Any) -> Tensor | None:
        """Return the parameter that several tensors are merged into, or None to leave the merging to Transformers.

        `parts` holds a sequence of tensors for each pattern of the converter: those whose names match it.
        """
        return None


class Converter(WeightConverter):
    """A converter with a cheap deep copy, which shares the patterns and has collected no tensors.

    Transformers copies a converter for every tensor of a checkpoint. Copies of the patterns took a tenth of a reload.
    """

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = copy.copy(self)
        copied.collected_tensors, copied.layer_targets = defaultdict(list), defaultdict(set)
        return copied


class MergingConverter(Converter):
    """A converter of experts that first offers them, one by one, to the quantizer's operation to merge."""

    __slots__ = ()

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        """Collect a tensor together with its name in the checkpoint."""
        named: Any = (source_key, future)
        super().add_tensor(target_key, source_key, source_pattern, named)

    def convert(
        self, layer_name: str, model: Any = None, config: Any = None, hf_quantizer: Any = None, loading_info: Any = None
    ) -> dict[str, Any]:
        """Return the merged parameter. Transformers makes it if the operation does not."""
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
    """A converter of the stored tensors of quantized weights. Its function `find` knows the parameter of each."""

    __slots__ = ("find",)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the parameter that a stored tensor belongs to, and the pattern under which it is collected.

        The converter is not marked as used: a save reverts used converters, and this one has no inverse.
        """
        target = self.find(source_key)
        return (source_key, None) if target is None else (target[0], _pattern(target[1]))


def make_converter(
    find: Callable[[str], tuple[str, str] | None],
    suffixes: Iterable[str],
    operation: QuantizerOp,
    on_cpu: bool = False,
) -> WeightConverter:
    """Return a converter that makes one parameter of several stored tensors.

    `find` returns the parameter and the suffix of each. `on_cpu` keeps the tensors on the CPU for the operation.
    """
    patterns = [_pattern(suffix) for suffix in suffixes]
    converter = StoredConverter(patterns, "weight", operations=[operation], force_cpu=on_cpu)
    converter.find = find
    return converter


def _pattern(suffix: str) -> str:
    # Patterns are also keys of collected tensors. No name of a tensor and no pattern of a model begins with a colon.
    return f":{suffix}"


def collected_by_suffix(collected: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored tensors that a converter of `make_converter` has collected, by suffix."""
    # A guard, the one-byte tensor under the plain name of a quantized weight, is collected too. Its key, a whole name,
    # begins with no colon.
    return {key[1:]: value for key, value in collected.items() if key.startswith(":")}


def offer_before_merging(conversion: Any) -> Any:
    """Return a converter that does the same as one of Transformers', but offers experts to the quantizer one by one.

    A conversion that does anything but merge experts is returned itself.
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
    """Return whether a conversion only merges experts, which a checkpoint holds one by one, into one parameter."""
    kinds = [(type(op), getattr(op, "dim", None)) for op in getattr(conversion, "operations", ())]
    return kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])


def restore_conversions(model: PreTrainedModel, quantized: Collection[str]) -> None:
    """Let a float save of a model write the same tensors, such as single experts, as if it had never been quantized.

    Transformers records the conversions that a load uses, and a save reverts these. The class of the model defines
    conversions for float weights. The load of a quantized checkpoint does not use two kinds of them: converters, and
    renamings that match no name of a stored tensor. This adds these two kinds to the record. The order is that in which
    the class defines them, because a save reverts them from the last to the first. Conversions that the class does not
    define, such as a user's `key_mapping`, come first.
    """
    used: list[Any] = getattr(model, "_weight_conversions", None) or []
    of_class = conversions_of_class(model)
    unused = without(of_class, used)
    missed = [item for item in unused if isinstance(item, WeightConverter) or renames_float_alone(item, quantized)]
    model._weight_conversions = [  # pyright: ignore[reportArgumentType]  (nn.Module takes any attribute)
        *without(used, of_class),
        *(item for item in of_class if item in missed or item not in unused),
    ]


def expect_unused(model: PreTrainedModel, name: str) -> None:
    """Keep Transformers from reporting a tensor of a checkpoint as unexpected. `name` may be the end of its name."""
    model._keys_to_ignore_on_load_unexpected = {
        *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
        rf"(^|\.){re.escape(name)}$",
    }


def checkpoint_tensors(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors, or copies, as a checkpoint of a model holds them: under its names, experts one by one."""
    return private("core_model_loading", "revert_weight_conversion")(model, tensors)


def names_not_saved(model: PreTrainedModel) -> set[str]:
    """Return the names in a model's state dict that Transformers leaves out of its files; empty if unknown."""
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
    """Let Transformers load a checkpoint into a model with another quantizer, on the CPU and without a report."""
    options = private("modeling_utils", "LoadStateDictConfig")(
        dtype=dtype,
        hf_quantizer=quantizer,
        weight_mapping=[offer_before_merging(copy.deepcopy(conversion)) for conversion in conversions],
        ignore_mismatched_sizes=True,
    )
    load = private_attribute(model, "_load_pretrained_model")
    finish = private_attribute(model, "_finalize_model_loading")
    verbosity = logging.get_verbosity()
    # The user's own load reports weights that are missing or of another shape, and draws random numbers for them.
    logging.set_verbosity(_SILENT)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            report, _ = load(model, None, [str(file) for file in files], options)
            finish(model, options, report)
    finally:
        logging.set_verbosity(verbosity)


def names_of_load(model: PreTrainedModel, tensors: Mapping[str, Tensor], conversions: Sequence[Any]) -> dict[str, str]:
    """Return the names that a load of tensors into a skeleton gets wrong, each with its problem.

    All tensors are on the meta device, so only names and shapes are compared.
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
    """Calls this thread's replacement of Transformers' `safe_save_file`, or the original if there is none."""

    def __init__(self, original: Callable[..., None]):
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        (_save_file.get() or self.original)(*args, **kwargs)


@contextlib.contextmanager
def writing_files_by(write: Callable[..., None]) -> Iterator[None]:
    """Let saves of Transformers in this thread write safetensors files with `write`, a function like `save_file`."""
    original: Any = getattr(modeling_utils, _SAVE_FILE, None)
    if not isinstance(original, _SaveFile):
        setattr(modeling_utils, _SAVE_FILE, _SaveFile(original))
    token = _save_file.set(write)
    try:
        yield
    finally:
        _save_file.reset(token)


def save_remote_code(model: PreTrainedModel, directory: Path, config: Any) -> None:
    """Copy the files of a model's own code, and change `config` so that it names them."""
    private("dynamic_module_utils", "custom_object_save")(model, directory, config=config)
