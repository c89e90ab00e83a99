"""Transformers' own exporter to ONNX, which knows how its models take inputs and return outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from hf_trainweights.models.host.versions import private


def onnx_graph(model: nn.Module, inputs: Mapping[str, Any], opset: int, dynamic_shapes: Any = None) -> Any:
    """Trace a model to an `onnx_ir.Model` whose dimensions are free wherever the model leaves them free."""
    exporter = private("exporters.exporter_onnx", "OnnxExporter")()
    config = private("exporters.configs", "OnnxConfig")(
        dynamic=True, opset_version=opset, dynamic_shapes=dynamic_shapes
    )
    with _without_caches(model) if inputs.get("use_cache") is False else contextlib.nullcontext():
        exported = exporter.export(model, dict(inputs), config)
    # 5.17 returns PyTorch's program, 5.23 its own.
    return exported.program if hasattr(exported, "components") else exported.model


@contextlib.contextmanager
def _without_caches(model: nn.Module) -> Iterator[None]:
    """Hold every configuration in a model at `use_cache=False` within the context.

    Transformers' exporter takes the argument and sets it in the model's configuration alone; T5's decoder has its own.
    """
    configs = {id(config): config for each in model.modules() if (config := getattr(each, "config", None)) is not None}
    caching = [config for config in configs.values() if getattr(config, "use_cache", None)]
    try:
        for config in caching:
            config.use_cache = False
        yield
    finally:
        for config in caching:
            config.use_cache = True
