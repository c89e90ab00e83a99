"""The only package that uses private names of Transformers: names that begin with an underscore or are undocumented.

Transformers is the host: this package runs as its plugin.
Transformers 5.17 to 5.24 have all of them, and `tests/models/host/` looks for each in the installed version. If a
version lacks one, a plain fallback gives the right result, or a typed error says which versions are supported.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import transformers
from transformers import PreTrainedModel

from hf_trainweights.errors import UnsupportedError

SUPPORTED = ">=5.17,<5.25"


def unsupported(name: str) -> UnsupportedError:
    """Return the error for a private name that the installed version lacks."""
    installed = f"{transformers.__version__}, which does not have it"
    return UnsupportedError(name, f"transformers{SUPPORTED}", installed, f"pip install 'transformers{SUPPORTED}'")


def private(module: str, name: str) -> Any:
    """Return a private function that has no fallback. UnsupportedError: the installed version lacks it."""
    try:
        return getattr(import_module(f"transformers.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise unsupported(f"transformers.{module}.{name}") from error


def private_attribute(model: PreTrainedModel, name: str) -> Any:
    """Return a private attribute that has no fallback. UnsupportedError: the installed version lacks it."""
    try:
        return getattr(model, name)
    except AttributeError as error:
        raise unsupported(f"{type(model).__name__}.{name}") from error
