"""`export_program`: a quantized model as a file of torch.export, or compiled ahead of time."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_trainweights.errors import ConfigError
from hf_trainweights.exports.example_inputs import ExampleInputs, Inputs
from hf_trainweights.exports.lowering import lowered
from hf_trainweights.exports.plain_calls import NamedCall, in_eval_mode, split_inputs
from hf_trainweights.exports.targets.aten import Aten
from hf_trainweights.files.staging import staged_files


def export_program(
    model: nn.Module,
    out: str | os.PathLike[str],
    example_inputs: ExampleInputs | None = None,
    dynamic_shapes: Any = None,
    aot: bool = False,
) -> None:
    """Write one call of a quantized model's `forward` as a `.pt2` file, which PyTorch reads without this package.

    The file holds the codes and scales; the program dequantizes each weight where it is used. The outputs of a model
    of Transformers become a dict of tensors.

    Args:
        model: A model with quantized weights.
        out: The file, which ends in `.pt2`. A file of that name is replaced.
        example_inputs: A tensor, a tuple or a dict of arguments; None for text and image models of Transformers.
        dynamic_shapes: Which dimensions are free, as for `torch.export.export`: a dict by names of arguments. Default:
            none is.
        aot: Whether to compile the program ahead of time by AOTInductor, for `torch._inductor.aoti_load_package` and
            C++. It needs a C++ compiler.

    Raises:
        ConfigError: `out` has another ending, nothing is quantized, or the inputs are missing.
        UnsupportedError: A weight is in a format that has no plain ops.
        SaveError: `out` cannot be written; what was there before is untouched.
    """
    out = Path(out)
    if out.suffix != ".pt2" or out.is_dir():
        raise ConfigError("out", "a file that ends in .pt2", str(out), f"Write to {out / 'model.pt2'}, for example.")
    inputs = Inputs.of(model, example_inputs)
    with in_eval_mode(model), lowered(model, Aten()), torch.no_grad():
        program = _trace(model, inputs, dynamic_shapes)
    with staged_files(out.parent, lambda name: name == out.name) as staged:
        path = staged.path / out.name
        if aot:
            with warnings.catch_warnings():
                # The compiler uses what PyTorch 2.13 itself deprecates, TorchScript for one.
                warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)
                warnings.simplefilter("ignore", FutureWarning)
                torch._inductor.aoti_compile_and_package(program, package_path=str(path))
        else:
            torch.export.save(program, path)


def _trace(model: nn.Module, inputs: Inputs, dynamic_shapes: Any) -> torch.export.ExportedProgram:
    if isinstance(model, PreTrainedModel):
        tensors, options = split_inputs(model, inputs)
        shapes = {"inputs": dynamic_shapes} if dynamic_shapes else None
        return torch.export.export(NamedCall(model, options), (), tensors, dynamic_shapes=shapes, strict=False)
    return torch.export.export(model, inputs.args, inputs.kwargs, dynamic_shapes=dynamic_shapes, strict=False)
