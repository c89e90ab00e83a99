"""`trainweights export`: writes a quantized model for readers without this package."""

from __future__ import annotations

import warnings
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hf_trainweights_cli.console import AsJson, Debug, errors_in_one_line, print_json, say, working
from hf_trainweights_cli.sources import Model, local_copy, require_nothing_at
from hf_trainweights_cli.tables import show_size


class Layout(StrEnum):
    """The layouts that `export` writes."""

    COMPRESSED_TENSORS = "compressed-tensors"
    GGUF = "gguf"
    ONNX = "onnx"
    TORCHSCRIPT = "torchscript"
    PT2 = "pt2"


class Runtime(StrEnum):
    """The ops of an ONNX file."""

    PORTABLE = "portable"
    ONNXRUNTIME = "onnxruntime"


def export(
    model: Model,
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="A new name: of a file *.gguf, *.onnx, *.pt2 or *.pt; for compressed-tensors of a directory.",
        ),
    ],
    to: Annotated[Layout, typer.Option("--to", help="The layout to write.")],
    runtime: Annotated[
        Runtime | None,
        typer.Option(help="With --to onnx: ops of ONNX alone (the default), or ONNX Runtime's own products."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a quantized model in a layout that is read without this package. All hold the same codes and scales.

    compressed-tensors: a directory, as stock Transformers reads it.

    gguf: one file with the tokenizer, as llama.cpp reads it.

    onnx: one call of the model as a graph, in float32, as ONNX Runtime reads it.

    torchscript: one call of the model as a program, as torch.jit.load and libtorch read it. PyTorch deprecates it.

    pt2: one call of the model as a program, as torch.export.load reads it.
    """
    if runtime is not None and to is not Layout.ONNX:
        raise typer.BadParameter(f"{to} has no runtimes; only onnx has.", param_hint="--runtime")
    # The file for the weights of an ONNX graph that is too large for one file.
    beside = [out.with_name(f"{out.name}.data")] if to is Layout.ONNX else []
    with errors_in_one_line(debug), working(f"exporting {model}"), warnings.catch_warnings():
        require_nothing_at(out, *beside)
        _export(local_copy(model), out, to, runtime or Runtime.PORTABLE)
    files = [out, *beside] if out.is_file() else [*out.glob("*.safetensors")]
    disk_bytes = sum(file.stat().st_size for file in files if file.exists())
    if as_json:
        print_json({"source": model, "out": str(out), "layout": to, "disk_bytes": disk_bytes})
    else:
        say(f"written to {out}: {to}, {show_size(disk_bytes)}")


def _export(path: Path, out: Path, to: Layout, runtime: Runtime) -> None:
    import hf_trainweights

    # Tracers warn about code of Transformers, which a user of the command cannot change.
    warnings.filterwarnings("ignore", message=".*trace.*")
    match to:
        case Layout.COMPRESSED_TENSORS:
            hf_trainweights.export_compressed_tensors(path, out)
        case Layout.GGUF:
            hf_trainweights.export_gguf(path, out)
        case Layout.ONNX:
            hf_trainweights.export_onnx(path, out, runtime=runtime.value)
        case Layout.TORCHSCRIPT:
            text = "PyTorch deprecates TorchScript, and a later release may not read it: `--to pt2` uses torch.export"
            say(f"warning: {text}", err=True)
            warnings.filterwarnings("ignore", message="PyTorch deprecates TorchScript", category=FutureWarning)
            hf_trainweights.export_torchscript(path, out)
        case Layout.PT2:
            hf_trainweights.export_program(path, out)
