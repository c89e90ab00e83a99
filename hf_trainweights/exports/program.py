"""`export_program`: a quantized model as a file of torch.export, or compiled ahead of time."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Mapping, Sequence
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_trainweights.errors import ConfigError
from hf_trainweights.exports.lowering import lowered
from hf_trainweights.exports.refusals import check_file_name, tracer_errors
from hf_trainweights.exports.sources import ExampleInputs, Inputs, NamedCall, in_eval_mode, model_of
from hf_trainweights.exports.targets import Target
from hf_trainweights.files.staging import staged_files


def export_program(
    model_or_directory: nn.Module | str | os.PathLike[str],
    out: str | os.PathLike[str],
    example_inputs: ExampleInputs | None = None,
    dynamic_shapes: Any = None,
    aot: bool = False,
) -> None:
    """Write one call of a quantized model's `forward` as a `.pt2` file, which PyTorch reads without this package.

    The file holds the codes and scales; the program dequantizes each weight where it is used. A program of a model of
    Transformers takes its tensors by name and returns a dict of tensors. Nothing is claimed for GPUs.

    Args:
        model_or_directory: A model with quantized weights, or the directory of a quantized model.
        out: The file, which ends in `.pt2`. A file of that name is replaced.
        example_inputs: A tensor, a tuple or a dict of arguments; None for text and image models of Transformers.
        dynamic_shapes: Which dimensions are free, as for `torch.export.export`: a dict by names of arguments, in which
            a model of Transformers may lack some. Default: none is.
        aot: Whether to compile the program ahead of time by AOTInductor, for `torch._inductor.aoti_load_package` and
            C++. It needs a C++ compiler.

    Raises:
        ConfigError: `out` has another ending, the directory holds no whole model, nothing is quantized, the inputs are
            missing, or `dynamic_shapes` names an argument that is not among them.
        CorruptFileError: A weight file of the directory is damaged.
        UnsupportedError: A weight is in a format that has no plain ops, or torch.export or the compiler cannot hold
            the model; the error names the module that it stumbled over.
        SaveError: `out` cannot be written; what was there before is untouched.

    Examples:
        >>> free = {"input_ids": {0: torch.export.Dim("batch")}}
        >>> export_program("models/bert-int8", "bert.pt2", dynamic_shapes=free)  # doctest: +SKIP
    """
    out = Path(out)
    check_file_name(out, ".pt2")
    model = model_of(model_or_directory)
    inputs = Inputs.of(model, example_inputs)
    with in_eval_mode(model), lowered(model, Target()), torch.no_grad():
        program = _trace(model, inputs, dynamic_shapes)
    with staged_files(out.parent, lambda name: name == out.name) as staged:
        path = staged.path / out.name
        if aot:
            _compile(model, program, path)
        else:
            path.write_bytes(_serialized(model, program))


def _trace(model: nn.Module, inputs: Inputs, dynamic_shapes: Any) -> torch.export.ExportedProgram:
    next_step = "Pass other example_inputs or dynamic_shapes, or use export_torchscript."
    call, args, kwargs = model, inputs.args, inputs.kwargs
    if isinstance(model, PreTrainedModel):
        tensors, options = inputs.split()
        call, args, kwargs = _called_by_name(model, options, tuple(tensors)), (), tensors
        dynamic_shapes = _shapes_of_all(tensors, dynamic_shapes)
    with tracer_errors(model, "torch.export", next_step):
        return torch.export.export(call, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)


def _called_by_name(model: PreTrainedModel, options: Mapping[str, Any], names: Sequence[str]) -> NamedCall:
    """Return a model with a signature that names its arguments: torch.export finds no dimensions behind `**inputs`."""
    call = NamedCall(model, options)

    def forward(**inputs: Tensor) -> dict[str, Tensor]:
        return NamedCall.forward(call, **inputs)

    forward.__signature__ = Signature([Parameter(name, Parameter.KEYWORD_ONLY) for name in names])  # type: ignore[attr-defined]
    call.forward = forward
    return call


def _shapes_of_all(tensors: Mapping[str, Tensor], dynamic_shapes: Any) -> Any:
    """Return what torch.export wants: an entry for each argument, or nothing."""
    if not isinstance(dynamic_shapes, Mapping):
        return dynamic_shapes
    unknown = sorted(map(str, set(dynamic_shapes) - set(tensors)))
    if unknown:
        next_step = "Name these, or pass example_inputs with what is missing."
        raise ConfigError("dynamic_shapes", f"names among {', '.join(tensors)}", ", ".join(unknown), next_step)
    return {name: dynamic_shapes.get(name) for name in tensors}


def _serialized(model: nn.Module, program: torch.export.ExportedProgram) -> memoryview:
    """Return the file. It is put together in memory: of a full disk, PyTorch's own writer tells by a RuntimeError."""
    buffer = io.BytesIO()
    with tracer_errors(model, "torch.export", "Use export_torchscript."):
        torch.export.save(program, buffer)
    return buffer.getbuffer()


def _compile(model: nn.Module, program: torch.export.ExportedProgram, path: Path) -> None:
    with warnings.catch_warnings(), tracer_errors(model, "AOTInductor", "Leave out aot.", passed=(OSError,)):
        # The compiler uses what PyTorch 2.13 itself deprecates, TorchScript for one.
        warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
