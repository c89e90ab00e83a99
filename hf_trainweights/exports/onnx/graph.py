"""Trace a lowered model to an ONNX graph, and write the graph to a file."""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_trainweights.errors import ConfigError
from hf_trainweights.exports.lowering import lowered
from hf_trainweights.exports.refusals import require, tracer_errors
from hf_trainweights.exports.sources import Inputs
from hf_trainweights.exports.targets import BLOCKS_OPSET, STORED, Target
from hf_trainweights.models.host.models import onnx_graph

# A protobuf of 2 GiB cannot be read. The rest is room for the graph itself.
_LARGEST_FILE_BYTES = 1_900_000_000

_OPSET_ADVICE = f"Leave it out, or pass {BLOCKS_OPSET}."

NEXT_STEP = "Pass other example_inputs or dynamic_shapes, or leave these out."
"""The advice in an error of tracing a model."""


class Part(nn.Module):
    """A part of a model of Transformers, such as its encoder. A subclass has the `forward` that is traced."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model: Any = model


def trace(
    model: nn.Module, inputs: Inputs, target: Target, opset: int, options: Mapping[str, Any] | None = None
) -> Any:
    """Trace a call of a quantized model in eval mode to an `onnx_ir.Model` that holds its codes and scales.

    The options are the arguments of `torch.onnx.export` for names and free dimensions.
    """
    require("onnxscript", "onnx")
    with lowered(model, target):
        graph = _traced(model, inputs, opset, options or {})
    if (written := graph.opset_imports.get("")) != opset:
        # If the exporter cannot convert its graph to an opset, it only logs that, and leaves the graph as it is.
        actual = f"{opset}, for which it writes {written}"
        raise ConfigError("opset", "one that the exporter can write", actual, _OPSET_ADVICE)
    _finish(graph)
    _forget_origins(graph)
    return graph


def save_graphs(graphs: Mapping[str, Any], directory: Path, external_data: bool | None) -> None:
    """Write each `onnx_ir.Model` to the file of its name, and with `external_data` its weights to `<file>.data`.

    If `external_data` is None, weights go to a second file if one file would become too large.
    """
    for name, graph in graphs.items():
        external = _is_too_large(graph) if external_data is None else external_data
        require("onnx_ir", "onnx").save(graph, directory / name, external_data=f"{name}.data" if external else None)


def name_dimensions(graph: Any, dimensions: Mapping[str, Mapping[int, str | int]]) -> None:
    """Replace the tracer's symbols, such as `s36 + s70`, by names in the shapes of all values, in place.

    `dimensions` has the names of each input's free dimensions, and the size of one that the tracer left free.
    """
    free = ((value.shape[axis], name) for value in graph.graph.inputs for axis, name in dimensions[value.name].items())
    names = {str(size): str(name) for size, name in free if not isinstance(size, int)}
    if not names:
        return
    symbol = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b")
    values = [*graph.graph.inputs, *(output for node in graph.graph.all_nodes() for output in node.outputs)]
    for value in values:
        for axis, size in enumerate(value.shape or ()):
            # An unknown size gets no name, because equal names would say that the sizes are equal.
            if getattr(size, "value", size) is None:
                continue
            text = symbol.sub(lambda match: names[match[0]], str(size))
            # The tracer orders terms by their symbols, which differ among models. Order them by names.
            if names.keys() >= {*(terms := str(size).split(" + "))}:
                text = " + ".join(sorted(names[term] for term in terms))
            # The text is a number if `dimensions` has the size of this dimension.
            value.shape[axis] = int(text) if text.isdigit() else text


def _traced(model: nn.Module, inputs: Inputs, opset: int, options: Mapping[str, Any]) -> Any:
    has_own_names = any(options.get(name) for name in ("dynamic_axes", "input_names", "output_names"))
    traced_model = model.model if isinstance(model, Part) else model
    with torch.no_grad(), _quiet(), tracer_errors(traced_model, "torch.onnx", NEXT_STEP):
        if isinstance(model, PreTrainedModel | Part) and not has_own_names:
            return onnx_graph(model, inputs.kwargs, opset, options.get("dynamic_shapes"))
        program = torch.onnx.export(
            model,
            inputs.args,
            kwargs=inputs.kwargs,
            dynamo=True,
            verbose=False,
            opset_version=opset,
            **options,
        )
    assert program is not None
    return program.model


def _finish(model: Any) -> None:
    """Remove the ops `STORED`, which have kept the exporter from computing with codes, and turn words into INT4.

    The words are those that DequantizeLinear reads: int32 of eight codes. This changes the model in place.
    """
    ir = require("onnx_ir", "onnx")
    domain, _, op_type = STORED.partition("::")
    for graph in model.graphs():
        for node in list(graph):
            stored = node.inputs[0] if (node.domain, node.op_type) == (domain, op_type) else None
            if stored is not None:
                ir.convenience.replace_all_uses_with(node.outputs[0], stored)
                graph.remove(node, safe=True)
        for value in list(graph.initializers.values()):
            words = value.const_value
            is_dequantized = any(node.op_type == "DequantizeLinear" and index == 0 for node, index in value.uses())
            if is_dequantized and words is not None and words.dtype == ir.DataType.INT32:
                shape = ir.Shape([*words.shape.numpy()[:-1], words.shape.numpy()[-1] * 8])
                value.const_value = _lazy_int4(words, shape, value.name)
                value.dtype, value.shape = ir.DataType.INT4, shape
        graph.opset_imports.pop(domain, None)


def _lazy_int4(words: Any, shape: Any, name: str | None) -> Any:
    ir = require("onnx_ir", "onnx")

    # Each nibble of a stored word is code + 8. ONNX's nibble is the code's two's complement, which differs in the
    # highest bit.
    def make() -> Any:
        octets = words.numpy().view(np.uint8) ^ 0x88
        return ir.PackedTensor(octets.reshape(-1), ir.DataType.INT4, shape=shape, name=name)

    return ir.LazyTensor(make, dtype=ir.DataType.INT4, shape=shape, name=name)


def _forget_origins(graph: Any) -> None:
    """Remove the stack traces that the exporter adds to each node: they name files of this machine, and take space."""
    for node in graph.graph.all_nodes():
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Send exporters' output to stderr, because a program may read stdout, and ignore warnings about their own code."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*'dynamic_axes' is not recommended")
        yield


def _is_too_large(graph: Any) -> bool:
    tensors = (value.const_value for value in graph.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None) > _LARGEST_FILE_BYTES
