"""A lowered model traced to an ONNX graph, and that graph written to a file."""

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

# A protobuf of 2 GiB cannot be read; the graph itself needs some room.
_LARGEST_FILE_BYTES = 1_900_000_000

_OPSET = f"Leave it out, or pass {BLOCKS_OPSET}."

NEXT_STEP = "Pass other example_inputs or dynamic_shapes, or leave these out."
"""What an error of tracing a model tells the reader to do."""


class Part(nn.Module):
    """A part of a model of Transformers, which Transformers' exporter traces as it does a whole one."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model: Any = model


def trace(
    model: nn.Module, inputs: Inputs, target: Target, opset: int, options: Mapping[str, Any] | None = None
) -> Any:
    """Return a call of a quantized model, in eval mode, as an `onnx_ir.Model` that holds its codes and scales.

    The options are those of `torch.onnx.export` for names and free dimensions.
    """
    require("onnxscript", "onnx")
    with lowered(model, target):
        graph = _traced(model, inputs, opset, options or {})
    if (written := graph.opset_imports.get("")) != opset:
        # Where the exporter cannot convert its graph, it says so in a log, and leaves the graph as it is.
        raise ConfigError("opset", "one that the exporter can write", f"{opset}, for which it writes {written}", _OPSET)
    _finish(graph)
    _forget_origins(graph)
    return graph


def save_graphs(graphs: Mapping[str, Any], directory: Path, external_data: bool | None) -> None:
    """Write each `onnx_ir.Model` to a file by its name, and its weights to `<file>.data` where that is asked for.

    Where `external_data` is None they go there if one file would become too large.
    """
    for name, graph in graphs.items():
        external = _is_too_large(graph) if external_data is None else external_data
        require("onnx_ir", "onnx").save(graph, directory / name, external_data=f"{name}.data" if external else None)


def name_dimensions(graph: Any, dimensions: Mapping[str, Mapping[int, str | int]]) -> None:
    """Exchange the tracer's symbols, such as `s36 + s70`, for names, in the shapes of all values, in place.

    `dimensions` holds for each input the names of its free dimensions, or the size of one that the tracer left free.
    """
    free = ((value.shape[axis], name) for value in graph.graph.inputs for axis, name in dimensions[value.name].items())
    names = {str(size): str(name) for size, name in free if not isinstance(size, int)}
    symbol = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b")
    values = [*graph.graph.inputs, *(output for node in graph.graph.all_nodes() for output in node.outputs)]
    for value in values:
        for axis, size in enumerate(value.shape or ()):
            # Sizes that are not known have no name: equal names would make them equal sizes.
            if getattr(size, "value", size) is None:
                continue
            text = symbol.sub(lambda match: names[match[0]], str(size))
            # Terms stand in the order of the symbols, which differs among models.
            if names.keys() >= {*(terms := str(size).split(" + "))}:
                text = " + ".join(sorted(names[term] for term in terms))
            # A size that the tracer takes for an expression may be a number.
            value.shape[axis] = int(text) if text.isdigit() else text


def _traced(model: nn.Module, inputs: Inputs, opset: int, options: Mapping[str, Any]) -> Any:
    own = any(options.get(name) for name in ("dynamic_axes", "input_names", "output_names"))
    whole = model.model if isinstance(model, Part) else model
    with torch.no_grad(), _quiet(), tracer_errors(whole, "torch.onnx", NEXT_STEP):
        if isinstance(model, PreTrainedModel | Part) and not own:
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
    """Remove the ops that mark stored tensors, and make int32 words that DequantizeLinear reads INT4; in place."""
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
            reads = any(node.op_type == "DequantizeLinear" and index == 0 for node, index in value.uses())
            if reads and words is not None and words.dtype == ir.DataType.INT32:
                shape = ir.Shape([*words.shape.numpy()[:-1], words.shape.numpy()[-1] * 8])
                value.const_value = _lazy_int4(words, shape, value.name)
                value.dtype, value.shape = ir.DataType.INT4, shape
        graph.opset_imports.pop(domain, None)


def _lazy_int4(words: Any, shape: Any, name: str | None) -> Any:
    ir = require("onnx_ir", "onnx")

    # A stored nibble is code + 8; ONNX's is the code's two's complement, which differs in the highest bit.
    def make() -> Any:
        octets = words.numpy().view(np.uint8) ^ 0x88
        return ir.PackedTensor(octets.reshape(-1), ir.DataType.INT4, shape=shape, name=name)

    return ir.LazyTensor(make, dtype=ir.DataType.INT4, shape=shape, name=name)


def _forget_origins(graph: Any) -> None:
    """Remove the stack traces that the exporter notes at each node: they name files of this machine, and take space."""
    for node in graph.graph.all_nodes():
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep exporters from writing to stdout, which a program may read, and from warning of their own insides."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*'dynamic_axes' is not recommended")
        yield


def _is_too_large(graph: Any) -> bool:
    tensors = (value.const_value for value in graph.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None) > _LARGEST_FILE_BYTES
