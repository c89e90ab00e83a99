"""The way from a model back to a checkpoint: Transformers' names, its own code, weights that lie elsewhere."""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, modeling_utils
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging

from hf_trainweights.models.host.converters import QuantizerOp, merges_experts, offer_before_merging
from hf_trainweights.models.host.models import has_adapters
from hf_trainweights.models.host.versions import private, private_attribute

# Above the level of every message.
_NOTHING = 100

# What `save_pretrained` writes a safetensors file by, and what stands in its place in this thread.
_SAVE_FILE = "safe_save_file"
_save_file: ContextVar[Callable[..., None] | None] = ContextVar("save_file", default=None)


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

    There are none for a quantized model, for one that saves its adapters alone, and for one that is none of
    Transformers.
    """
    if not isinstance(module, PreTrainedModel) or getattr(module, "hf_quantizer", None) or has_adapters(module):
        return set()
    state = {name: tensor.to("meta") for name, tensor in module.state_dict().items()}
    return {name for name, tensor in checkpoint_tensors(module, state).items() if state.get(name) is not tensor}


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
    original = getattr(modeling_utils, _SAVE_FILE, None)
    if original is None:
        yield
        return
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
