"""Contracts: the promises of each format, its products, each codec and each layout of checkpoints, as pytest classes.

Whoever writes a format or a codec subclasses one, names the subject, and runs pytest. Only tests import this package,
because it needs pytest.
"""

from __future__ import annotations

import pytest

from hf_trainweights.lazy import lazy

_MODULES = {
    "CodecContract": "codecs",
    "FormatContract": "formats",
    "LayoutContract": "layouts",
    "ProductContract": "products",
}

__all__ = [*_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]

# pytest shows the values in a failed `assert` only for modules that are registered with it before they are imported.
_REWRITTEN = ("codecs", "formats", "layouts", "products", "format_values", "format_tensors", "values")
pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in _REWRITTEN))
__getattr__ = lazy(__name__, _MODULES)
