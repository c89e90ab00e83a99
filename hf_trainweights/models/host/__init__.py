"""The one door to the private names of Transformers: those with an underscore, and those its documentation leaves out.

Transformers 5.17 to 5.24 have all of them; `tests/models/host/` asks the installed version for each. Where a version
lacks one, a plain fallback gives the right result, or a typed error says which versions are supported.
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
    found = f"{transformers.__version__}, which does not have it"
    return UnsupportedError(name, f"transformers{SUPPORTED}", found, f"pip install 'transformers{SUPPORTED}'")


def private(module: str, name: str) -> Any:
    """Return a private function that no fallback replaces; UnsupportedError: the installed version lacks it."""
    try:
        return getattr(import_module(f"transformers.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise unsupported(f"transformers.{module}.{name}") from error


def private_attribute(model: PreTrainedModel, name: str) -> Any:
    """Return a private attribute that no fallback replaces; UnsupportedError: the installed version lacks it."""
    try:
        return getattr(model, name)
    except AttributeError as error:
        raise unsupported(f"{type(model).__name__}.{name}") from error
