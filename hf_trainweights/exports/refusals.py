"""Errors that several exports raise: a package is missing, a file name is wrong, or a tracer fails."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from torch import nn

from hf_trainweights.errors import ConfigError, TrainWeightsError, UnsupportedError

_SHOWN_CHARACTERS = 500
# The local variables that refer to a module, in the frames of the module's own code and of TorchScript's compiler.
_MODULE_VARIABLES = ("self", "nn_module")


def require(name: str, extra: Literal["onnx", "gguf"]) -> Any:
    """Import a module of a package that an extra of this package installs; UnsupportedError: it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        next_step = f'pip install "hf_trainweights[{extra}]"'
        raise UnsupportedError(extra.upper(), f"the package {name}", str(error), next_step) from error


def check_file_name(out: Path, suffix: str) -> None:
    """Check that a file to write has the ending `suffix` and is no directory; else ConfigError."""
    if out.suffix != suffix or out.is_dir():
        file = out / f"model{suffix}" if out.is_dir() else out.with_suffix(suffix)
        raise ConfigError("out", f"a file that ends in {suffix}", str(out), f"Write to {file}, for example.")


@contextlib.contextmanager
def tracer_errors(model: nn.Module, tracer: str, next_step: str) -> Iterator[None]:
    """Turn errors of a tracer, but not of a disk, into an UnsupportedError that names the innermost failing module."""
    try:
        yield
    except (TrainWeightsError, Warning):
        raise
    # Tracers have dozens of error classes, most of them private.
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:  # without errno: missing source code
            raise
        where = _failing_module(model, error)
        reason = f"{type(error).__name__}: {str(error).strip()[:_SHOWN_CHARACTERS]}"
        raise UnsupportedError(where, f"a module that {tracer} can hold", reason, next_step) from error


def _failing_module(model: nn.Module, error: BaseException) -> str:
    """Return the class of a model and, if an error arose in one of its modules, the name of the innermost module."""
    names = {module: name for name, module in model.named_modules() if name}
    where = type(model).__name__
    cause: BaseException | None = error
    while cause is not None:
        module = _innermost(names, cause.__traceback__)
        if module is not None:
            where = f"{type(model).__name__}.{names[module]}"
        # The first error of the chain is nearest to the fault, so its module replaces the others.
        cause = cause.__cause__ or cause.__context__
    return where


def _innermost(names: dict[nn.Module, str], traceback: TracebackType | None) -> nn.Module | None:
    innermost = None
    while traceback is not None:
        values = (traceback.tb_frame.f_locals.get(name) for name in _MODULE_VARIABLES)
        innermost = next((value for value in values if isinstance(value, nn.Module) and value in names), innermost)
        traceback = traceback.tb_next
    return innermost
