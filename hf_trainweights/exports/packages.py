"""The packages that some files need, each of which an extra of this one brings."""

from __future__ import annotations

import importlib
from typing import Any, Literal

from hf_trainweights.errors import UnsupportedError


def require(name: str, extra: Literal["onnx", "gguf"]) -> Any:
    """Import a module that an extra brings; UnsupportedError: it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        next_step = f'pip install "hf_trainweights[{extra}]"'
        raise UnsupportedError(extra.upper(), f"the package {name}", str(error), next_step) from error
