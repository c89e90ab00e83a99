"""Tiny float models that tests of this folder quantize."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES


@pytest.fixture(scope="module")
def float_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Save each float model once."""
    root = tmp_path_factory.mktemp("float")

    def directory(name: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
        target = root / f"{name}-{dtype}"
        if not target.exists():
            ARCHITECTURES[name].build(dtype).save_pretrained(target)
        return target

    return directory
