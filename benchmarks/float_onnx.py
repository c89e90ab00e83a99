"""Float models as ONNX files, by PyTorch's exporter alone: what exports and ONNX Runtime are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def export_float(model: nn.Module, inputs: Any, path: Path) -> None:
    """Write a float model.

    Args:
        model: The model.
        inputs: Its arguments by name, of which tokens `[B, T]` may have any size, and images `[B, ...]` any batch; or
            one tensor, whose shape is kept.
        path: The file to write.
    """
    named = isinstance(inputs, dict)
    shapes = {name: _free(value) for name, value in inputs.items()} if named else None
    program = torch.onnx.export(
        model, () if named else (inputs,), kwargs=inputs if named else None, dynamo=True, verbose=False,
        opset_version=21, dynamic_shapes=shapes, external_data=False, f=str(path),
    )  # fmt: skip
    assert program is not None


def _free(value: Tensor) -> dict[int, Any]:
    return dict.fromkeys(range(1 if value.is_floating_point() else 2), torch.export.Dim.DYNAMIC)
