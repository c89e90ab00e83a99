"""Transformers' own exporter to ONNX, which knows how its models take inputs and return outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_trainweights.models.host.versions import private


def onnx_graph(model: nn.Module, inputs: Mapping[str, Any], opset: int, dynamic_shapes: Any = None) -> Any:
    """Trace a model to an ONNX graph whose dimensions are free wherever the model leaves them free.

    Args:
        model: A model of Transformers, or a part of one, of plain modules.
        inputs: Arguments of its `forward`.
        opset: Version of ONNX's ops.
        dynamic_shapes: As for `torch.export.export`; None for all.

    Returns:
        An `onnx_ir.Model`.

    Raises:
        UnsupportedError: The installed version has no exporter.
    """
    exporter = private("exporters.exporter_onnx", "OnnxExporter")()
    config = private("exporters.configs", "OnnxConfig")(
        dynamic=True, opset_version=opset, dynamic_shapes=dynamic_shapes
    )
    exported = exporter.export(model, dict(inputs), config)
    # 5.17 returns PyTorch's program, 5.23 its own.
    return exported.program if hasattr(exported, "components") else exported.model
