"""`export_onnx`: a quantized model as an ONNX file that holds the same codes."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_trainweights.errors import ConfigError, UnsupportedError
from hf_trainweights.exports.example_inputs import ExampleInputs, Inputs
from hf_trainweights.exports.lowering import lowered
from hf_trainweights.exports.onnx.packages import require
from hf_trainweights.exports.onnx.verification import verify_onnx_model
from hf_trainweights.exports.plain_calls import in_eval_mode
from hf_trainweights.exports.targets.onnx import BLOCKS_OPSET, Onnx
from hf_trainweights.exports.targets.onnxruntime import OnnxRuntime
from hf_trainweights.files.staging import staged_files
from hf_trainweights.models.directory import load_saved
from hf_trainweights.models.host.exporters import onnx_graph

_TARGETS = {"portable": Onnx, "onnxruntime": OnnxRuntime}

# A protobuf of 2 GiB cannot be read; the graph itself needs some room.
_LARGEST_FILE_BYTES = 1_900_000_000

_SHOWN_CHARACTERS = 500


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep exporters from writing to stdout, which a program may read, and from warning of their own insides."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*'dynamic_axes' is not recommended")
        yield


@contextlib.contextmanager
def _errors_of_exporters(model: nn.Module) -> Iterator[None]:
    try:
        yield
    # torch.export and torch.onnx have dozens of their own, most of them private.
    except Exception as error:
        found = f"{type(error).__name__}: {str(error).strip()[:_SHOWN_CHARACTERS]}"
        next_step = "Pass other example_inputs or dynamic_shapes, or leave these out."
        raise UnsupportedError(type(model).__name__, "a model that torch.onnx can trace", found, next_step) from error


@dataclass(frozen=True)
class _Graph:
    """How the graph is to be: opset, names and free dimensions; see `export_onnx`."""

    opset: int
    dynamic_axes: Mapping[str, Any] | None
    dynamic_shapes: Any
    input_names: Sequence[str] | None
    output_names: Sequence[str] | None

    def trace(self, model: nn.Module, inputs: Inputs) -> Any:
        """Return the graph of a lowered model, an `onnx_ir.Model`."""
        own = self.dynamic_axes or self.input_names or self.output_names
        with torch.no_grad(), _quiet(), _errors_of_exporters(model):
            if isinstance(model, PreTrainedModel) and not own:
                return onnx_graph(model, inputs.by_name(model), self.opset, self.dynamic_shapes)
            program = torch.onnx.export(
                model,
                inputs.args,
                kwargs=inputs.kwargs,
                dynamo=True,
                verbose=False,
                opset_version=self.opset,
                dynamic_axes=self.dynamic_axes,
                dynamic_shapes=self.dynamic_shapes,
                input_names=self.input_names,
                output_names=self.output_names,
            )
        assert program is not None
        return program.model


def export_onnx(
    model_or_directory: nn.Module | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    example_inputs: ExampleInputs | None = None,
    runtime: Literal["portable", "onnxruntime"] = "portable",
    opset: int = BLOCKS_OPSET,
    dynamic_axes: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    external_data: bool | None = None,
    verify: bool = True,
) -> None:
    """Write one call of a quantized model's `forward` as an ONNX file that holds the same codes and scales.

    Args:
        model_or_directory: A module with quantized float32 weights, or the directory of a quantized model.
        out: The file, which ends in `.onnx`. A file of that name is replaced.
        example_inputs: A tensor, a tuple or a dict of arguments; None for text and image models of Transformers.
        runtime: `"portable"` for ops of ONNX alone; `"onnxruntime"` for ONNX Runtime's own products of codes.
        opset: Version of ONNX's ops, at least 21.
        dynamic_axes: As for `torch.onnx.export`. Of a model of Transformers all axes are free that it leaves free.
        dynamic_shapes: As for `torch.export.export`.
        input_names: Names of the graph's inputs.
        output_names: Names of its outputs.
        external_data: Whether weights go to a second file, `<out>.data`; None where the first would become too large.
        verify: Whether to run the file in ONNX Runtime before it is put in place, and compare.

    Raises:
        ConfigError: An option is wrong, the directory holds no whole model, or nothing in it is quantized.
        CorruptFileError: A weight file of the directory is damaged.
        UnsupportedError: ONNX cannot hold the model, or computes something else with it, or a package is missing.
        SaveError: `out` cannot be written; what was there before is untouched.
    """
    out = Path(out)
    _check(out, runtime, opset)
    ir = require("onnx_ir")
    require("onnxscript")
    retype = require("hf_trainweights.exports.onnx.int4_initializers").retype
    model = model_or_directory if isinstance(model_or_directory, nn.Module) else _load(model_or_directory)
    inputs = Inputs.of(model, example_inputs)
    graph = _Graph(opset, dynamic_axes, dynamic_shapes, input_names, output_names)
    with in_eval_mode(model):
        with lowered(model, _TARGETS[runtime]()):
            traced = graph.trace(model, inputs)
        retype(traced)
        data = f"{out.name}.data"
        with staged_files(out.parent, lambda name: name in {out.name, data}) as staged:
            path = staged.path / out.name
            ir.save(traced, path, external_data=data if _is_external(traced, external_data) else None)
            if verify:
                _verify(path, model, inputs)


def _check(out: Path, runtime: str, opset: int) -> None:
    if runtime not in _TARGETS:
        raise ConfigError("runtime", f"one of {', '.join(_TARGETS)}", repr(runtime), "Choose one of these.")
    if opset < BLOCKS_OPSET:
        found = f"{opset}, which has no scales for blocks"
        raise ConfigError("opset", f"{BLOCKS_OPSET} or later", found, f"Leave it out, or pass {BLOCKS_OPSET}.")
    if out.suffix != ".onnx" or out.is_dir():
        raise ConfigError("out", "a file that ends in .onnx", str(out), f"Write to {out / 'model.onnx'}, for example.")


def _load(directory: str | os.PathLike[str]) -> PreTrainedModel:
    """Return a saved model that computes in float32; codes and scales stay as they are."""
    return load_saved(directory).to(torch.float32)  # type: ignore[arg-type]


def _is_external(graph: Any, external_data: bool | None) -> bool:
    if external_data is not None:
        return external_data
    tensors = (value.const_value for value in graph.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None) > _LARGEST_FILE_BYTES


def _verify(path: Path, model: nn.Module, inputs: Inputs) -> None:
    report = verify_onnx_model(path, model, inputs.by_name(model))
    if not report:
        raise UnsupportedError(
            path.name,
            "a graph that computes what the model computes",
            str(report),
            "Pass verify=False to look at the file; nothing was written.",
        )
