"""What exports to ONNX share."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_table_of_operators() -> Iterator[None]:
    """Let PyTorch make its table of ONNX's operators once: that takes longer than the export of a tiny model."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry  # imports what only exports need

    made = functools.cache(ONNXRegistry.from_torchlib)

    def from_torchlib(opset_version: int) -> Any:
        table = copy.copy(made(opset_version))
        table.functions = {name: [*functions] for name, functions in table.functions.items()}  # exports add to it
        return table

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(from_torchlib))
        yield
