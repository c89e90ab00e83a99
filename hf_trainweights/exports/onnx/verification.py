"""`verify_onnx_model`: whether an ONNX file is valid and computes what a model computes."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.exports.lowering import lowered
from hf_trainweights.exports.onnx.model import OnnxModel
from hf_trainweights.exports.refusals import require
from hf_trainweights.exports.sources import ExampleInputs, Inputs
from hf_trainweights.exports.targets import Target


@dataclass(frozen=True)
class OutputDifference:
    """How far one output of the file is from the model's.

    Args:
        name: The output's name in the file.
        largest_difference: The largest absolute difference.
        largest_value: The largest finite magnitude that the model returns.
        ok: Whether the shape is the same, and the difference within the tolerance.
    """

    name: str
    largest_difference: float
    largest_value: float
    ok: bool

    def __str__(self) -> str:
        verdict = "" if self.ok else ", which is too much"
        return f"{self.name}: off by {self.largest_difference:.2g} of {self.largest_value:.2g}{verdict}"


@dataclass(frozen=True)
class VerificationReport:
    """What `verify_onnx_model` found; its truth value is the verdict.

    Args:
        outputs: Each output of the file.
    """

    outputs: tuple[OutputDifference, ...]

    def __bool__(self) -> bool:
        return bool(self.outputs) and all(output.ok for output in self.outputs)

    def __str__(self) -> str:
        return "; ".join(map(str, self.outputs))


def verify_onnx_model(
    path: str | os.PathLike[str], model: nn.Module, inputs: ExampleInputs, rtol: float = 1e-5, atol: float = 1e-6
) -> VerificationReport:
    """Run an ONNX file and the model it came from on the same inputs, and compare each output.

    A quantized model computes with its dequantized weights, one layer at a time.

    Args:
        path: The file.
        model: The model.
        inputs: A tensor, a tuple or a dict of arguments of the model.
        rtol: How large a difference may be, relative to the largest magnitude of the output.
        atol: How large it may be besides.

    Returns:
        The largest difference of each output, and the verdict.

    Raises:
        CorruptFileError: The file is no valid ONNX, or has other inputs or outputs than the model.
        UnsupportedError: A package is missing.
    """
    session = open_valid(path)
    arguments = Inputs.of(model, inputs)
    wanted = _call(model, arguments)
    found = session.predict(_fed(session, model, arguments))
    if len(found) != len(wanted):
        raise CorruptFileError(str(path), f"{len(wanted)} outputs", f"{len(found)}", "Export this model again.")
    pairs = zip(found.items(), wanted, strict=True)
    return VerificationReport(tuple(compare(name, value, own, rtol, atol) for (name, value), own in pairs))


def open_valid(path: str | os.PathLike[str]) -> OnnxModel:
    """Return a file, ready to run on the CPU, after ONNX's own check; CorruptFileError: it is not valid."""
    checker = require("onnx.checker", "onnx")
    try:
        checker.check_model(os.fspath(path), full_check=True)
    # The check of shapes has an exception of its own.
    except Exception as error:
        raise CorruptFileError(str(path), "valid ONNX", str(error), "Export the model again.") from error
    return OnnxModel(path, providers=["CPUExecutionProvider"])


def _fed(session: OnnxModel, model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """Return the file's inputs: by the names of the model's arguments, or in their order where the file has others."""
    named = inputs.by_name(model)
    if named.keys() >= set(session.input_names):
        return {name: named[name] for name in session.input_names}
    tensors = (value for value in (*inputs.args, *inputs.kwargs.values()) if isinstance(value, Tensor))
    return dict(zip(session.input_names, tensors, strict=False))


def _call(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    with torch.no_grad(), lowered(model, Target()):
        result = model(*inputs.args, **inputs.kwargs)
    return [each for each in tree_leaves(result) if isinstance(each, Tensor)]


def compare(name: str, found: np.ndarray, wanted: Tensor, rtol: float = 1e-5, atol: float = 1e-6) -> OutputDifference:
    """Return how far an output of a file is from the model's; `rtol` is relative to the largest magnitude of these."""
    if found.shape != wanted.shape or found.size == 0:
        return OutputDifference(name, math.nan, math.nan, found.shape == wanted.shape)
    a, b = torch.from_numpy(found).double(), wanted.detach().cpu().double()
    # Of equal infinities, such as those that mask a score, the difference is NaN. NaN on either side is no agreement.
    difference = torch.where(a == b, 0.0, a - b).abs().max().item()
    largest = torch.where(b.isfinite(), b, 0.0).abs().max().item()
    return OutputDifference(name, difference, largest, difference <= atol + rtol * largest)
