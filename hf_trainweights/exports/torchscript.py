"""`export_torchscript`: a quantized model as a TorchScript file, which C++ runs by libtorch."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_trainweights.errors import ConfigError, UnsupportedError
from hf_trainweights.exports.example_inputs import ExampleInputs, Inputs
from hf_trainweights.exports.lowering import lowered
from hf_trainweights.exports.plain_calls import OrderedCall, in_eval_mode, split_inputs
from hf_trainweights.exports.scripted_layers import scripted_layer
from hf_trainweights.exports.targets.aten import Aten
from hf_trainweights.files.staging import staged_files


def export_torchscript(
    model: nn.Module,
    out: str | os.PathLike[str],
    example_inputs: ExampleInputs | None = None,
    method: Literal["trace", "script"] = "trace",
    optimize: bool = False,
) -> None:
    """Write a quantized model as a TorchScript file, which PyTorch and libtorch read without this package.

    The file holds the codes and scales; the program dequantizes each weight where it is used. A traced model of
    Transformers takes its tensors in the order of `example_inputs` and returns a tuple of tensors.

    Args:
        model: A model with quantized weights.
        out: The file. One of that name is replaced.
        example_inputs: A tensor, a tuple or a dict of arguments, for tracing; None for text and image models of
            Transformers, and for scripting.
        method: `"trace"` records one call; `"script"` compiles the modules' code, with its control flow and with all
            methods that are marked `@torch.jit.export`. Transformers' models cannot be compiled.
        optimize: Whether to freeze the model and let `torch.jit.optimize_for_inference` rewrite it.

    Raises:
        ConfigError: `method` is wrong, nothing is quantized, or the inputs are missing.
        UnsupportedError: TorchScript cannot hold the model; the error says what it stumbled over.
        SaveError: `out` cannot be written; what was there before is untouched.
    """
    out = Path(out)
    if method not in ("trace", "script"):
        raise ConfigError("method", "trace or script", repr(method), "Choose one of these.")
    if out.is_dir():
        raise ConfigError("out", "a file", f"the directory {out}", f"Write to {out / 'model.pt'}, for example.")
    inputs = Inputs.of(model, example_inputs) if method == "trace" else None
    with _without_deprecation(), in_eval_mode(model), lowered(model, Aten()), torch.no_grad():
        with _errors_of_torchscript(model):
            script = _script(model) if inputs is None else _trace(model, inputs)
        if optimize:
            script = torch.jit.optimize_for_inference(torch.jit.freeze(script.eval()))
        with staged_files(out.parent, lambda name: name == out.name) as staged:
            torch.jit.save(script, staged.path / out.name)


def _script(model: nn.Module) -> Any:
    with _scripted_layers(model) as whole:
        return torch.jit.script(whole)


def _trace(model: nn.Module, inputs: Inputs) -> Any:
    if isinstance(model, PreTrainedModel):
        tensors, options = split_inputs(model, inputs)
        call = OrderedCall(model, list(tensors), options).eval()
        return torch.jit.trace(call, tuple(tensors.values()))
    # Tracing compiles those methods that are marked torch.jit.export.
    with _scripted_layers(model) as whole:
        if inputs.kwargs:
            return torch.jit.trace(whole, example_kwarg_inputs=inputs.kwargs)
        return torch.jit.trace(whole, inputs.args)


@contextlib.contextmanager
def _scripted_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Hold layers that TorchScript compiles in the place of lowered ones within the context, where there are any."""
    layers = {module: layer for module in model.modules() if (layer := scripted_layer(module)) is not None}
    parents = [(parent, dict(parent._modules)) for parent in model.modules()]
    try:
        for parent, children in parents:
            parent._modules.update({name: layers[child] for name, child in children.items() if child in layers})
        yield layers.get(model, model)
    finally:
        for parent, children in parents:
            parent._modules.update(children)


@contextlib.contextmanager
def _errors_of_torchscript(model: nn.Module) -> Iterator[None]:
    try:
        yield
    # TorchScript raises RuntimeError, OSError, AttributeError and errors of its own.
    except Exception as error:
        found = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        next_step = 'Use method="trace", or export_program or export_onnx.'
        raise UnsupportedError(type(model).__name__, "a module that TorchScript can hold", found, next_step) from error


@contextlib.contextmanager
def _without_deprecation() -> Iterator[None]:
    """Keep PyTorch 2.13 from saying at each step that TorchScript is deprecated: whoever calls this has chosen it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)
        # TorchScript reads all properties of a model, also those that Transformers is about to remove.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        yield
