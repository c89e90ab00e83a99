"""`export_program` and `export_torchscript`: write a quantized model as a file that PyTorch itself runs, from C++ too.

This module does not import `annotations` from `__future__`: TorchScript compiles a layer of this module, and cannot
read annotations that are strings.
"""

import contextlib
import io
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_trainweights.errors import ConfigError
from hf_trainweights.exports.lowering import LoweredWeight, lowered
from hf_trainweights.exports.refusals import check_file_name, tracer_errors
from hf_trainweights.exports.sources import ExampleInputs, Inputs, NamedCall, OrderedCall, in_eval_mode, model_of
from hf_trainweights.exports.targets import Target
from hf_trainweights.files.staging import staged_files

DEPRECATION = "PyTorch deprecates TorchScript, and a later release may not read it: export_program uses torch.export."


def export_program(
    model_or_directory: nn.Module | str | os.PathLike[str],
    out: str | os.PathLike[str],
    example_inputs: ExampleInputs | None = None,
    dynamic_shapes: Any = None,
    aot: bool = False,
) -> None:
    """Write one call of a quantized model's `forward` as a `.pt2` file, which PyTorch reads without this package.

    The file holds the codes and scales, and the program dequantizes each weight where it is used. A program of a model
    of Transformers takes its tensors by name and returns a dict of tensors. No promise is made for GPUs.

    Args:
        model_or_directory: A model with quantized weights, or the directory of a quantized model.
        out: The file, which ends in `.pt2`. A file of that name is replaced.
        example_inputs: A tensor, a tuple or a dict of arguments; None for text and image models of Transformers.
        dynamic_shapes: Which dimensions are free, as for `torch.export.export`: a dict by names of arguments, in which
            arguments of a model of Transformers may be missing. By default no dimension is free.
        aot: Whether to compile the program ahead of time by AOTInductor, for `torch._inductor.aoti_load_package` and
            C++. It needs a C++ compiler.

    Raises:
        ConfigError: `out` has another ending, the directory holds no complete model, no weight is quantized, the inputs
            are missing, or `dynamic_shapes` names an argument that is not among the inputs.
        CorruptFileError: A weight file of the directory is damaged.
        UnsupportedError: A weight is in a format that has no plain ops, or torch.export or the compiler cannot hold
            the model. The error names the module that caused it.
        SaveError: `out` cannot be written. An earlier file there is untouched.

    Examples:
        >>> free = {"input_ids": {0: torch.export.Dim("batch")}}
        >>> export_program("models/bert-int8", "bert.pt2", dynamic_shapes=free)  # doctest: +SKIP
    """
    out = Path(out)
    check_file_name(out, ".pt2")
    model = model_of(model_or_directory)
    inputs = Inputs.of(model, example_inputs)
    # Save within eval mode: saving reads the weights, and a module may change them when it leaves eval mode.
    with in_eval_mode(model):
        with lowered(model, Target()), torch.no_grad():
            program = _traced_program(model, inputs, dynamic_shapes)
        with staged_files(out.parent, lambda name: name == out.name) as staged:
            path = staged.path / out.name
            if aot:
                _compile_program(model, program, path)
            else:
                path.write_bytes(_saved_program(model, program))


def _traced_program(model: nn.Module, inputs: Inputs, dynamic_shapes: Any) -> torch.export.ExportedProgram:
    next_step = "Pass other example_inputs or dynamic_shapes, or use export_torchscript."
    call, args, kwargs = model, inputs.args, inputs.kwargs
    if isinstance(model, PreTrainedModel):
        tensors, options = inputs.split()
        call, args, kwargs = _called_by_name(model, options, tuple(tensors)), (), tensors
        dynamic_shapes = _shapes_of_all(tensors, dynamic_shapes)
    with tracer_errors(model, "torch.export", next_step):
        return torch.export.export(call, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)


def _called_by_name(model: PreTrainedModel, options: Mapping[str, Any], names: Sequence[str]) -> NamedCall:
    """Give a model a signature that names its arguments: torch.export finds no dimensions behind `**inputs`."""
    call = NamedCall(model, options)

    def forward(**inputs: Tensor) -> dict[str, Tensor]:
        return NamedCall.forward(call, **inputs)

    forward.__signature__ = Signature([Parameter(name, Parameter.KEYWORD_ONLY) for name in names])  # type: ignore[attr-defined]
    call.forward = forward
    return call


def _shapes_of_all(tensors: Mapping[str, Tensor], dynamic_shapes: Any) -> Any:
    """Add an entry for each argument that `dynamic_shapes` lacks, because torch.export expects all or no entries."""
    if not isinstance(dynamic_shapes, Mapping):
        return dynamic_shapes
    unknown = sorted(map(str, set(dynamic_shapes) - set(tensors)))
    if unknown:
        next_step = "Name these, or pass example_inputs with what is missing."
        raise ConfigError("dynamic_shapes", f"names among {', '.join(tensors)}", ", ".join(unknown), next_step)
    return {name: dynamic_shapes.get(name) for name in tensors}


def _saved_program(model: nn.Module, program: torch.export.ExportedProgram) -> memoryview:
    """Build the file in memory, because on a full disk PyTorch's own writer raises a RuntimeError, not an OSError."""
    buffer = io.BytesIO()
    with tracer_errors(model, "torch.export", "Use export_torchscript."):
        torch.export.save(program, buffer)
    return buffer.getbuffer()


def _compile_program(model: nn.Module, program: torch.export.ExportedProgram, path: Path) -> None:
    with warnings.catch_warnings(), tracer_errors(model, "AOTInductor", "Leave out aot."):
        # The compiler itself uses deprecated parts of PyTorch, such as TorchScript.
        warnings.filterwarnings("ignore", message=".*torch.jit.*")
        warnings.simplefilter("ignore", FutureWarning)
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))


def export_torchscript(
    model_or_directory: nn.Module | str | os.PathLike[str],
    out: str | os.PathLike[str],
    example_inputs: ExampleInputs | None = None,
    method: Literal["trace", "script"] = "trace",
    optimize: bool = False,
) -> None:
    """Write a quantized model as a TorchScript file, which PyTorch and libtorch read without this package.

    The file holds the codes and scales, and the program dequantizes each weight where it is used. A traced model of
    Transformers takes its tensors in the order of `example_inputs` and returns a tuple of tensors.

    PyTorch deprecates TorchScript, and a FutureWarning says so. `export_program` writes a program of `torch.export`.

    Args:
        model_or_directory: A model with quantized weights, or the directory of a quantized model.
        out: The file. A file of that name is replaced.
        example_inputs: A tensor, a tuple or a dict of arguments, for tracing; None for text and image models of
            Transformers, and for scripting.
        method: `"trace"` records one call; `"script"` compiles the modules' code, with its control flow and with all
            methods that are marked `@torch.jit.export`. Transformers' models cannot be compiled.
        optimize: Whether to freeze the model and let `torch.jit.optimize_for_inference` rewrite it. Freezing
            dequantizes the weights, so the file is as large as that of a float model. The outputs of a float32 model
            stay within 1e-6, the outputs of a bfloat16 model change by about 1% of their norm. PyTorch 2.13 cannot save
            such a file if a method besides `forward` reads a float8 embedding.

    Raises:
        ConfigError: `method` is wrong, the directory holds no complete model, no weight is quantized, or the inputs are
            missing.
        CorruptFileError: A weight file of the directory is damaged.
        UnsupportedError: TorchScript cannot hold the model. The error names the module that caused it.
        SaveError: `out` cannot be written. An earlier file there is untouched.

    Examples:
        >>> export_torchscript("models/bert-int8", "bert.pt")  # doctest: +SKIP
    """
    out = Path(out)
    if method not in ("trace", "script"):
        raise ConfigError("method", "trace or script", repr(method), "Choose one of these.")
    if out.is_dir():
        raise ConfigError("out", "a file", f"the directory {out}", f"Write to {out / 'model.pt'}, for example.")
    model = model_of(model_or_directory)
    inputs = Inputs.of(model, example_inputs) if method == "trace" else None
    warnings.warn(DEPRECATION, FutureWarning, stacklevel=2)
    with _without_deprecation(), in_eval_mode(model), lowered(model, Target()):
        content = _serialized(model, _compiled(model, inputs), optimize)
    with staged_files(out.parent, lambda name: name == out.name) as staged:
        (staged.path / out.name).write_bytes(content)


def torchscript_bytes(model: nn.Module, example_inputs: ExampleInputs | None = None) -> bytes:
    """Return the TorchScript file of a float or quantized model: traced if there are inputs, else compiled."""
    is_traced = example_inputs is not None or isinstance(model, PreTrainedModel)
    inputs = Inputs.of(model, example_inputs) if is_traced else None
    with _without_deprecation(), in_eval_mode(model), lowered(model, Target()):
        return _serialized(model, _compiled(model, inputs), optimize=False)


def _compiled(model: nn.Module, inputs: Inputs | None) -> Any:
    """Trace a lowered model in eval mode as TorchScript, or compile it if there are no inputs."""
    with torch.no_grad():
        if inputs is None:
            next_step = 'Use method="trace", or export_program or export_onnx.'
            with _scripted_layers(model) as scriptable, tracer_errors(scriptable, "TorchScript", next_step):
                return torch.jit.script(scriptable)
        return _traced(model, inputs)


def _traced(model: nn.Module, inputs: Inputs) -> Any:
    next_step = "Pass other example_inputs, or use export_program or export_onnx."
    if isinstance(model, PreTrainedModel):
        tensors, options = inputs.split()
        call = OrderedCall(model, list(tensors), options).eval()
        with tracer_errors(model, "TorchScript", next_step):
            return torch.jit.trace(call, tuple(tensors.values()))
    # Tracing compiles the methods that are marked torch.jit.export, so layers must be ones that can be compiled.
    with _scripted_layers(model) as scriptable, tracer_errors(scriptable, "TorchScript", next_step):
        if inputs.kwargs:
            return torch.jit.trace(scriptable, example_kwarg_inputs=inputs.kwargs)
        return torch.jit.trace(scriptable, inputs.args)


def _serialized(model: nn.Module, script: Any, optimize: bool) -> bytes:
    """Build the file in memory, because on a full disk PyTorch's own writer raises a RuntimeError, not an OSError."""
    with tracer_errors(model, "TorchScript", "Leave out optimize." if optimize else "Use export_program."):
        return (_optimized(script) if optimize else script).save_to_buffer()


def _optimized(script: Any) -> Any:
    """Freeze and optimize a module with all its methods."""
    methods = [name for name in script._c._method_names() if name != "forward"]
    frozen = torch.jit.freeze(script.eval(), preserved_attrs=methods)
    return torch.jit.optimize_for_inference(frozen, other_methods=methods)


@contextlib.contextmanager
def _scripted_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Replace lowered layers by layers that TorchScript can compile, and put them back when the context ends."""
    layers = {module: layer for module in model.modules() if (layer := _scripted_layer(module)) is not None}
    parents = [(parent, dict(parent._modules)) for parent in model.modules()]
    try:
        for parent, children in parents:
            parent._modules.update({name: layers[child] for name, child in children.items() if child in layers})
        yield layers.get(model, model)
    finally:
        for parent, children in parents:
            parent._modules.update(children)


class _ScriptedLayer(nn.Module):
    """A lowered Linear or Embedding that TorchScript can compile, with the sizes that its model may read from it."""

    def __init__(self, module: nn.Module, example: Tensor, **sizes: int):
        super().__init__()
        for name, size in sizes.items():
            setattr(self, name, size)
        # The ops of a format are traced, because TorchScript can compile only little of Python.
        self.recorded: Any = torch.jit.trace(module, example, check_trace=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Call the layer."""
        return self.recorded(input)


def _scripted_layer(module: Any) -> nn.Module | None:
    """Return a layer that TorchScript can compile in place of a lowered module; None if the module needs none."""
    weight = vars(module).get("weight")
    if isinstance(weight, LoweredWeight):
        if type(module).forward is nn.Linear.forward:
            rows, columns = weight.shape
            x = torch.zeros(1, columns, dtype=weight.dtype)
            return _ScriptedLayer(module, x, out_features=rows, in_features=columns)
        if type(module).forward is nn.Embedding.forward and module.max_norm is None:
            rows, columns = weight.shape
            x = torch.zeros(1, dtype=torch.int64)
            return _ScriptedLayer(module, x, num_embeddings=rows, embedding_dim=columns)
    return None


@contextlib.contextmanager
def _without_deprecation() -> Iterator[None]:
    """Suppress PyTorch's warnings at each step that TorchScript is deprecated: `DEPRECATION` says it once."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.\w+` is ")
        # TorchScript reads all properties of a model, including a deprecated one of Transformers, which warns.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        yield
