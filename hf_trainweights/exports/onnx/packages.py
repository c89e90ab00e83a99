"""The packages that ONNX files need, which are an extra of this one."""

from __future__ import annotations

import importlib
from typing import Any

from hf_trainweights.errors import UnsupportedError


def require(name: str) -> Any:
    """Import a package of the extra `onnx`.

    Args:
        name: Of the module.

    Raises:
        UnsupportedError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        next_step = 'pip install "hf_trainweights[onnx]"'
        raise UnsupportedError("ONNX", f"the package {name}", str(error), next_step) from error
