"""The inputs that a module is run on for measurements, and the tensors in all that it takes and returns."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from hf_trainweights.errors import ConfigError
from hf_trainweights.models.host.models import is_cache

# Keyword arguments of a model, or a tensor as its only argument.
Batch = Mapping[str, Tensor] | Tensor


def does_not_run(error: Exception) -> ConfigError:
    """Return the error that tells a user that a module's own code raised `error` on a batch."""
    expected, problem = "inputs that the module runs on", f"{type(error).__name__}: {error}"
    return ConfigError("calibration", expected, problem[:300], "Pass what model(**batch) takes.")


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in the output of a module, in their order."""
    if isinstance(output, Tensor):
        yield output
    for item in output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ():
        yield from tensors_in(item)


def copied(value: Any) -> Any:
    """Return a value with a copy of each tensor and cache in it: a module may change these, and the original stays."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if is_cache(value):
        return copy.deepcopy(value)
    if type(value) is dict:
        return {name: copied(entry) for name, entry in value.items()}
    return type(value)(map(copied, value)) if type(value) in (list, tuple) else value
