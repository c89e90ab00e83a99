"""Skips of tests at the oldest supported Transformers, each with its reason."""

from __future__ import annotations

import pytest
import transformers
from packaging.version import Version

IS_OLDEST = Version(transformers.__version__) < Version("5.18")


def not_by_5_17(reason: str) -> pytest.MarkDecorator:
    """Mark a test of something that Transformers 5.17 lacks or does otherwise."""
    return pytest.mark.skipif(IS_OLDEST, reason=reason)
