"""`tracer_errors`: what PyTorch's tracers and compilers raise, as an error that names the module they stumbled over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType

from torch import nn

from hf_trainweights.errors import TrainWeightsError, UnsupportedError

_SHOWN_CHARACTERS = 500
# What PyTorch's frames call the module that they are at: in a module's own code, and where TorchScript compiles it.
_LOCALS = ("self", "nn_module")


@contextlib.contextmanager
def tracer_errors(
    model: nn.Module, tracer: str, next_step: str, passed: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turn errors of a tracer, but those `passed`, into UnsupportedErrors that name the innermost module at work."""
    try:
        yield
    except (TrainWeightsError, *passed):
        raise
    # Tracers have dozens of errors of their own, most of them private.
    except Exception as error:
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
