"""What an export cannot do, as errors that say what to do: a package is missing, a tracer gives up, a name is none."""

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
# What PyTorch's frames call the module that they are at: in a module's own code, and where TorchScript compiles it.
_LOCALS = ("self", "nn_module")


def require(name: str, extra: Literal["onnx", "gguf"]) -> Any:
    """Import a module that an extra brings; UnsupportedError: it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        next_step = f'pip install "hf_trainweights[{extra}]"'
        raise UnsupportedError(extra.upper(), f"the package {name}", str(error), next_step) from error


def check_file_name(out: Path, suffix: str) -> None:
    """Check that the name of a file to write has an ending and is no directory's; else ConfigError."""
    if out.suffix != suffix or out.is_dir():
        file = out / f"model{suffix}" if out.is_dir() else out.with_suffix(suffix)
        raise ConfigError("out", f"a file that ends in {suffix}", str(out), f"Write to {file}, for example.")


@contextlib.contextmanager
def tracer_errors(model: nn.Module, tracer: str, next_step: str) -> Iterator[None]:
    """Turn errors of a tracer, but not those of a disk, into UnsupportedErrors that name the innermost module."""
    try:
        yield
    except (TrainWeightsError, Warning):
        raise
    # Tracers have dozens of errors of their own, most of them private.
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:  # without a number: source code that is missing
            raise
        where = _place(model, error)
        found = f"{type(error).__name__}: {str(error).strip()[:_SHOWN_CHARACTERS]}"
        raise UnsupportedError(where, f"a module that {tracer} can hold", found, next_step) from error


def _place(model: nn.Module, error: BaseException) -> str:
    """Return the class of a model and, if an error came out of one of its modules, the name of the innermost one."""
    names = {module: name for name, module in model.named_modules() if name}
    place = type(model).__name__
    cause: BaseException | None = error
    while cause is not None:
        module = _innermost(names, cause.__traceback__)
        if module is not None:
            place = f"{type(model).__name__}.{names[module]}"
        # The error that came first knows best.
        cause = cause.__cause__ or cause.__context__
    return place


def _innermost(names: dict[nn.Module, str], traceback: TracebackType | None) -> nn.Module | None:
    found = None
    while traceback is not None:
        held = (traceback.tb_frame.f_locals.get(name) for name in _LOCALS)
        found = next((each for each in held if isinstance(each, nn.Module) and each in names), found)
        traceback = traceback.tb_next
    return found
