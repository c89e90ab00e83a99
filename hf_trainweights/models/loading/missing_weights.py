"""Quantized weights that a checkpoint lacks altogether, which Transformers would start from random numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.models.choosing.selection import NOT_IN_CHECKPOINT
from hf_trainweights.models.choosing.summary import Summary
from hf_trainweights.models.host.models import base_prefix, was_loaded
from hf_trainweights.models.loading.stored_weights import StoredWeight

_SHOWN = 3


def saved_class(config: PretrainedConfig) -> tuple[str, Any]:
    """Return the name of the class that a model was saved as, and the class, None if Transformers does not have it."""
    saved_as = config.architectures
    name = saved_as[0] if isinstance(saved_as, (list, tuple)) and saved_as else "none"
    cls = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        return str(name), None
    # PreTrainedModel itself is no model: to make one would leave marks on the class that change every other model.
    fits = cls.config_class is not None and isinstance(config, cls.config_class)
    return str(name), cls if fits else None


def parameter_names(cls: type[PreTrainedModel], config: PretrainedConfig) -> set[str]:
    """Return the names of all parameters of a model that is not made, all names of a tied one."""
    with torch.device("meta"):
        return {name for name, _ in cls(copy.deepcopy(config)).named_parameters(remove_duplicate=False)}


def check_guards(model: PreTrainedModel, names: Iterable[str], stored: Mapping[str, StoredWeight]) -> None:
    """Check that no quantized weight is lost of which the files still have the guard."""
    prefix = base_prefix(model)
    guards = {name.removeprefix(prefix): weight.file for name, weight in stored.items() if weight.kind == "guard"}
    lost = {name: guards[name.removeprefix(prefix)] for name in names if name.removeprefix(prefix) in guards}
    for name, file in lost.items():
        expected = f"the stored tensors of {name} beside its guard"
        next_step = "The file was edited. Download the model again, or save it again from the source."
        raise CorruptFileError(str(file), expected, "none", next_step)


def check_none_is_missing(model: PreTrainedModel, summary: Summary, stored: Mapping[str, StoredWeight]) -> None:
    """Check that every weight that the saved model had in a quantized form was in its checkpoint.

    A new head is no part of the model that was saved, and may start from random numbers.
    """
    files = sorted({str(weight.file.parent) for weight in stored.values()})
    if not summary.quantized:
        expected = "quantized weights, as the quantization_config in config.json says"
        next_step = "If its weights are float, take that entry out of config.json; else save the quantized model again."
        raise ConfigError(files[0] if files else "checkpoint", expected, str(summary), next_step)
    prefix = base_prefix(model)
    in_files = {name.removeprefix(prefix) for name, weight in stored.items() if weight.kind != "guard"}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = [
        choice.name
        for choice in summary.tensors
        if choice.reason == NOT_IN_CHECKPOINT
        and choice.name.removeprefix(prefix) not in in_files
        and not was_loaded(parameters[choice.name])
    ]
    if not missing:
        return
    saved = {name.removeprefix(prefix) for name in _names_when_saved(model, parameters)}
    lost = [name for name in missing if name.removeprefix(prefix) in saved]
    if lost:
        more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
        raise CorruptFileError(
            files[0] if files else "checkpoint",
            "the stored tensors of every quantized weight",
            f"none of {', '.join(lost[:_SHOWN])}{more}",
            "Transformers would start these from random numbers. Download the model again, or save it again from the "
            "source.",
        )


def _names_when_saved(model: PreTrainedModel, parameters: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the parameters of the class that the model was saved as; none where nobody knows it."""
    name, cls = saved_class(model.config)
    if name == type(model).__name__:
        return set(parameters)
    return set() if cls is None else parameter_names(cls, model.config)
