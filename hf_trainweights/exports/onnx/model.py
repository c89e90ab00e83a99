"""`OnnxModel` and `verify_onnx_model`: an ONNX file run in ONNX Runtime, and compared with the model it came from."""

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

# One array or tensor, several in order, or several by name.
OnnxInputs = np.ndarray | Tensor | Sequence[Any] | Mapping[str, Any]


class OnnxModel:
    """An ONNX file, ready to run.

    Args:
        path: The file.
        providers: Names of execution providers of ONNX Runtime, the best first. Default: CUDA where it is there, then
            the CPU.

    Raises:
        CorruptFileError: ONNX Runtime cannot read the file.
        ConfigError: It has no such provider.
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
        # It has an exception of its own for each of its error codes.
        except Exception as error:
            raise self._refused("a model that ONNX Runtime reads", error, "Export it again.") from error
        self._inputs = {each.name: each for each in self._session.get_inputs()}
        self.output_names = tuple(each.name for each in self._session.get_outputs())

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the inputs, in order."""
        return tuple(self._inputs)

    @property
    def input_shapes(self) -> dict[str, list[int | str | None]]:
        """The shape of each input; a dimension that is free is a text, or None."""
        return {name: list(each.shape) for name, each in self._inputs.items()}

    @property
    def providers(self) -> tuple[str, ...]:
        """The execution providers that the file runs on, the best first."""
        return tuple(self._session.get_providers())

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, np.ndarray]:
        """Return `predict` of inputs in order, or by name."""
        named = {**dict(zip(self.input_names, args, strict=False)), **kwargs}
        if kwargs and len(named) < len(args) + len(kwargs):
            found = f"{len(args)} in order and {', '.join(kwargs)}"
            raise ConfigError("inputs", f"each of these once: {self._shown()}", found, "Leave the others out.")
        return self.predict(named if kwargs else args)

    def predict(self, inputs: OnnxInputs) -> dict[str, np.ndarray]:
        """Run the model.

        Args:
            inputs: An array or tensor, several of them in order, or by name.

        Returns:
            Each output by name.

        Raises:
            ConfigError: An input is missing, unknown, or of another shape or dtype than the file's.
            CorruptFileError: ONNX Runtime cannot compute what the file says, with these inputs.
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
        """Run the model over parts of a large batch.

        Args:
            inputs: As for `predict`; the first dimension of each is the batch's.
            batch_size: Rows of one part, at least 1; the last part has the rest.

        Returns:
            Each output by name, for the whole batch.

        Raises:
            ConfigError: As for `predict`; or the inputs have different numbers of rows, or none; or an output has none.
        """
        if batch_size < 1:
            raise ConfigError("batch_size", "at least 1", str(batch_size), "Choose a larger one.")
        arrays = self._named(inputs)
        rows = {len(array) for array in arrays.values() if array.ndim}
        if len(rows) != 1 or not all(array.ndim for array in arrays.values()) or rows == {0}:
            shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
            raise ConfigError("inputs", "the same number of rows in each, and at least one", shapes, "Check the batch.")
        starts = range(0, rows.pop(), batch_size)
        parts = [self.predict({name: a[start : start + batch_size] for name, a in arrays.items()}) for start in starts]
        if single := [name for name in self.output_names if not parts[0][name].ndim]:
            raise ConfigError(f"output {single[0]}", "a row for each of the batch", "one number", "Use predict.")
        return {name: np.concatenate([part[name] for part in parts]) for name in self.output_names}

    def _named(self, inputs: OnnxInputs) -> dict[str, np.ndarray]:
        if isinstance(inputs, np.ndarray | Tensor):
            inputs = (inputs,)
        if not isinstance(inputs, Mapping):
            if len(inputs) > len(self._inputs):
                found = f"{len(inputs)} inputs"
                raise ConfigError("inputs", f"{len(self._inputs)}: {self._shown()}", found, "Leave the others out.")
            inputs = dict(zip(self._inputs, inputs, strict=False))
        if inputs.keys() != self._inputs.keys():
            raise ConfigError("inputs", self._shown(), ", ".join(inputs) or "none", "Pass each of these, by its name.")
        return {name: _array(name, inputs[name]) for name in self._inputs}

    def _checked(self, inputs: OnnxInputs) -> dict[str, np.ndarray]:
        arrays = self._named(inputs)
        for name, array in arrays.items():
            shape, kind = self._inputs[name].shape, self._inputs[name].type
            # A dimension that is free is a text, or None.
            sizes = zip(shape, array.shape, strict=False)
            fits = len(shape) == array.ndim and all(own == size for own, size in sizes if isinstance(own, int))
            if not fits or _TYPES.get(kind, array.dtype) != array.dtype:
                found = f"{array.dtype} {list(array.shape)}"
                raise ConfigError(f"input {name}", f"{kind} {shape}", found, "Change shape or dtype, or export again.")
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
    except Warning:
        raise
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
