"""`OnnxModel` and `verify_onnx_model`: run an ONNX file in ONNX Runtime, and compare it with its model."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.exports.lowering import lowered
from hf_trainweights.exports.refusals import require
from hf_trainweights.exports.sources import ExampleInputs, Inputs
from hf_trainweights.exports.targets import Target

_PROVIDERS = ("CUDAExecutionProvider", "CPUExecutionProvider")

_TYPES = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(double)": np.dtype(np.float64),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(int64)": np.dtype(np.int64),
    "tensor(int32)": np.dtype(np.int32),
    "tensor(uint8)": np.dtype(np.uint8),
    "tensor(int8)": np.dtype(np.int8),
    "tensor(bool)": np.dtype(np.bool_),
}

# The inputs that a caller passes: one array or tensor, several in order, or several by name.
OnnxInputs = np.ndarray | Tensor | Sequence[Any] | Mapping[str, Any]


class OnnxModel:
    """An ONNX file, ready to run.

    Args:
        path: The file.
        providers: Names of execution providers of ONNX Runtime, the best first. Default: CUDA if there is one, then
            the CPU.

    Raises:
        CorruptFileError: ONNX Runtime cannot read the file.
        ConfigError: ONNX Runtime has no such provider.
        UnsupportedError: ONNX Runtime is not installed.
    """

    def __init__(self, path: str | os.PathLike[str], providers: Sequence[str] | None = None):
        runtime = require("onnxruntime", "onnx")
        self._path = str(path)
        available = runtime.get_available_providers()
        chosen = [name for name in _PROVIDERS if name in available] if providers is None else list(providers)
        if missing := set(chosen) - set(available):
            expected = f"some of {', '.join(available)}"
            raise ConfigError("providers", expected, ", ".join(sorted(missing)), "Install the runtime that has them.")
        try:
            self._session = runtime.InferenceSession(os.fspath(path), providers=chosen)
        except Warning:
            raise
        # ONNX Runtime has a class of exceptions for each of its error codes.
        except Exception as error:
            raise self._refused("a model that ONNX Runtime reads", error, "Export it again.") from error
        self._inputs = {node.name: node for node in self._session.get_inputs()}
        self.output_names = tuple(node.name for node in self._session.get_outputs())

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the inputs, in order."""
        return tuple(self._inputs)

    @property
    def input_shapes(self) -> dict[str, list[int | str | None]]:
        """The shape of each input. A free dimension is a text, or None."""
        return {name: list(node.shape) for name, node in self._inputs.items()}

    @property
    def providers(self) -> tuple[str, ...]:
        """The execution providers that the file runs on, the best first."""
        return tuple(self._session.get_providers())

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, np.ndarray]:
        """Run the model as `predict` does, on inputs in order or by name."""
        named = {**dict(zip(self.input_names, args, strict=False)), **kwargs}
        if kwargs and len(named) < len(args) + len(kwargs):
            described = f"{len(args)} in order and {', '.join(kwargs)}"
            raise ConfigError("inputs", f"each of these once: {self._shown()}", described, "Leave the others out.")
        return self.predict(named if kwargs else args)

    def predict(self, inputs: OnnxInputs) -> dict[str, np.ndarray]:
        """Run the model.

        Args:
            inputs: An array or tensor, several of them in order, or by name.

        Returns:
            Each output by name.

        Raises:
            ConfigError: An input is missing or unknown, or its shape or dtype differs from the file's.
            CorruptFileError: ONNX Runtime cannot compute the file's graph with these inputs.
        """
        arrays = self._checked(inputs)
        try:
            outputs = self._session.run(None, arrays)
        except Warning:
            raise
        except Exception as error:
            next_step = "Check the values of the inputs; if they are right, export it again."
            raise self._refused("a model that ONNX Runtime computes with these inputs", error, next_step) from error
        return dict(zip(self.output_names, outputs, strict=True))

    def predict_batch(self, inputs: OnnxInputs, batch_size: int = 32) -> dict[str, np.ndarray]:
        """Run the model on a large batch, some rows at a time.

        Args:
            inputs: As for `predict`. The first dimension of each is the batch.
            batch_size: Rows of one run, at least 1. The last run has the rest.

        Returns:
            Each output by name, for the full batch.

        Raises:
            ConfigError: As for `predict`; or inputs have different numbers of rows, or none; or an output has no rows.
        """
        if batch_size < 1:
            raise ConfigError("batch_size", "at least 1", str(batch_size), "Choose a larger one.")
        arrays = self._named(inputs)
        rows = {len(array) for array in arrays.values() if array.ndim}
        if len(rows) != 1 or not all(array.ndim for array in arrays.values()) or rows == {0}:
            shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
            raise ConfigError("inputs", "the same number of rows in each, and at least one", shapes, "Check the batch.")
        starts = range(0, rows.pop(), batch_size)
        runs = [self.predict({name: a[start : start + batch_size] for name, a in arrays.items()}) for start in starts]
        if single := [name for name in self.output_names if not runs[0][name].ndim]:
            raise ConfigError(f"output {single[0]}", "a row for each of the batch", "one number", "Use predict.")
        return {name: np.concatenate([run[name] for run in runs]) for name in self.output_names}

    def _named(self, inputs: OnnxInputs) -> dict[str, np.ndarray]:
        if isinstance(inputs, np.ndarray | Tensor):
            inputs = (inputs,)
        if not isinstance(inputs, Mapping):
            if len(inputs) > len(self._inputs):
                too_many = f"{len(inputs)} inputs"
                raise ConfigError("inputs", f"{len(self._inputs)}: {self._shown()}", too_many, "Leave the others out.")
            inputs = dict(zip(self._inputs, inputs, strict=False))
        if inputs.keys() != self._inputs.keys():
            raise ConfigError("inputs", self._shown(), ", ".join(inputs) or "none", "Pass each of these, by its name.")
        return {name: _array(name, inputs[name]) for name in self._inputs}

    def _checked(self, inputs: OnnxInputs) -> dict[str, np.ndarray]:
        arrays = self._named(inputs)
        for name, array in arrays.items():
            shape, kind = self._inputs[name].shape, self._inputs[name].type
            # A free dimension is a text, or None.
            sizes = zip(shape, array.shape, strict=False)
            fits = len(shape) == array.ndim and all(wanted == size for wanted, size in sizes if isinstance(wanted, int))
            if not fits or _TYPES.get(kind, array.dtype) != array.dtype:
                actual = f"{array.dtype} {list(array.shape)}"
                raise ConfigError(f"input {name}", f"{kind} {shape}", actual, "Change shape or dtype, or export again.")
        return arrays

    def _refused(self, expected: str, error: Exception, next_step: str) -> CorruptFileError:
        return CorruptFileError(self._path, expected, str(error), next_step)

    def _shown(self) -> str:
        return ", ".join(self._inputs)


def _array(name: str, value: Any) -> np.ndarray:
    try:
        return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    except (TypeError, ValueError) as error:
        next_step = "Change its dtype, such as from bfloat16 to float32."
        raise ConfigError(f"input {name}", "what NumPy has an array for", str(error), next_step) from error


@dataclass(frozen=True)
class OutputDifference:
    """How far one output of the file is from the model's.

    Args:
        name: The output's name in the file.
        largest_difference: The largest absolute difference.
        largest_value: The largest finite magnitude in the model's output.
        ok: Whether the shapes are equal, and the difference is within the tolerance.
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
    """The result of `verify_onnx_model`. It is true if there are outputs and all of them agree.

    Args:
        outputs: The difference of each output of the file.
    """

    outputs: tuple[OutputDifference, ...]

    def __bool__(self) -> bool:
        return bool(self.outputs) and all(output.ok for output in self.outputs)

    def __str__(self) -> str:
        return "; ".join(map(str, self.outputs))


def verify_onnx_model(
    path: str | os.PathLike[str], model: nn.Module, inputs: ExampleInputs, rtol: float = 1e-5, atol: float = 1e-6
) -> VerificationReport:
    """Run an ONNX file and the model it was made from on the same inputs, and compare each output.

    A quantized model computes with its dequantized weights, one layer at a time.

    Args:
        path: The file.
        model: The model.
        inputs: A tensor, a tuple or a dict of arguments of the model.
        rtol: The allowed difference relative to the largest magnitude of the output.
        atol: The allowed difference in addition to that.

    Returns:
        The largest difference of each output, and whether it is allowed.

    Raises:
        CorruptFileError: The file is not valid ONNX, or has other inputs or outputs than the model.
        UnsupportedError: A package is missing.
    """
    session = open_valid(path)
    arguments = Inputs.of(model, inputs)
    wanted = _call(model, arguments)
    outputs = session.predict(_fed(session, model, arguments))
    if len(outputs) != len(wanted):
        raise CorruptFileError(str(path), f"{len(wanted)} outputs", f"{len(outputs)}", "Export this model again.")
    pairs = zip(outputs.items(), wanted, strict=True)
    return VerificationReport(tuple(compare(name, value, expected, rtol, atol) for (name, value), expected in pairs))


def open_valid(path: str | os.PathLike[str]) -> OnnxModel:
    """Check a file by ONNX's own checker, and open it to run on the CPU; CorruptFileError: it is not valid."""
    checker = require("onnx.checker", "onnx")
    try:
        checker.check_model(os.fspath(path), full_check=True)
    except Warning:
        raise
    # The check of shapes raises another class of errors than the other checks.
    except Exception as error:
        raise CorruptFileError(str(path), "valid ONNX", str(error), "Export the model again.") from error
    return OnnxModel(path, providers=["CPUExecutionProvider"])


def _fed(session: OnnxModel, model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """Return the file's inputs by the names of the model's arguments, or in their order if the file has other names."""
    named = inputs.by_name(model)
    if named.keys() >= set(session.input_names):
        return {name: named[name] for name in session.input_names}
    tensors = (value for value in (*inputs.args, *inputs.kwargs.values()) if isinstance(value, Tensor))
    return dict(zip(session.input_names, tensors, strict=False))


def _call(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    with torch.no_grad(), lowered(model, Target()):
        result = model(*inputs.args, **inputs.kwargs)
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def compare(name: str, output: np.ndarray, wanted: Tensor, rtol: float = 1e-5, atol: float = 1e-6) -> OutputDifference:
    """Compare an output of a file with the model's; `rtol` and `atol` are those of `verify_onnx_model`."""
    if output.shape != wanted.shape or output.size == 0:
        return OutputDifference(name, math.nan, math.nan, output.shape == wanted.shape)
    a, b = torch.from_numpy(output).double(), wanted.detach().cpu().double()
    # The difference of equal infinities, such as masked scores, would be NaN. NaN on either side never agrees.
    difference = torch.where(a == b, 0.0, a - b).abs().max().item()
    largest = torch.where(b.isfinite(), b, 0.0).abs().max().item()
    return OutputDifference(name, difference, largest, difference <= atol + rtol * largest)
