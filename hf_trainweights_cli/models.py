"""`trainweights quantize`, `inspect`, `verify`, `diff` and `export`: the commands for saved models."""

from __future__ import annotations

import json
import tomllib
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_trainweights_cli.console import (
    AsJson,
    Debug,
    errors_in_one_line,
    exit_with,
    loading_bars,
    new_table,
    print_comparison,
    print_json,
    print_table,
    say,
    show_size,
    status,
)
from hf_trainweights_cli.summaries import print_summary, summary_as_json

if TYPE_CHECKING:
    from hf_trainweights.inspection.listing import Entry

ModelDirectory = Annotated[
    Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="Directory of a quantized model.")
]
NewDirectory = Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty directory.")]


class Layout(StrEnum):
    """The layouts that others read."""

    COMPRESSED_TENSORS = "compressed-tensors"
    GGUF = "gguf"
    ONNX = "onnx"
    TORCHSCRIPT = "torchscript"
    PT2 = "pt2"


class Runtime(StrEnum):
    """The ops of an ONNX file."""

    PORTABLE = "portable"
    ONNXRUNTIME = "onnxruntime"


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Directory or Hub id of a float model.")],
    out: NewDirectory,
    name: Annotated[str, typer.Option("--format", metavar="NAME", help="int8, int4 or float8_e4m3.")],
    group_size: Annotated[
        int | None, typer.Option(metavar="N", help="Weights that share a scale; the format's default if not given.")
    ] = None,
    include_embeddings: Annotated[
        bool, typer.Option("--include-embeddings", help="Quantize the input embeddings and the output head too.")
    ] = False,
    activations: Annotated[
        str | None, typer.Option(metavar="NAME", help="int8: products of integers; with --format int8 and no groups.")
    ] = None,
    rules: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help='JSON or TOML: names, or "re:" and a regular expression, to a format; false leaves a weight alone.',
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Quantize a saved model into another directory, tokenizer and processor included.

    Each weight is quantized as it is read, so the float model need not fit into memory, but the quantized one must.
    """
    overrides = _read_rules(rules) if rules else None
    # Imported here, so that `--help` does not wait for Transformers.
    from hf_trainweights import TrainWeightsConfig
    from hf_trainweights.errors import ConfigError
    from hf_trainweights.models.directory import quantize_directory

    try:
        options: dict[str, Any] = {"overrides": overrides, "include_embeddings": include_embeddings}
        config = TrainWeightsConfig(name, group_size, activations=activations, **options)
    except ConfigError as error:
        hint = (
            "--rules" if error.where.startswith("overrides") else f"--{error.where.partition(' ')[0].replace('_', '-')}"
        )
        raise typer.BadParameter(str(error), param_hint=hint) from error
    loading_bars()
    with errors_in_one_line(debug):
        summary = quantize_directory(model, out, config)
    if as_json:
        print_json({"source": model, "out": str(out), **summary_as_json(summary)})
    else:
        print_summary(summary)


def inspect(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", exists=True, help="A model or checkpoint directory, or one weight file.")
    ],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the tensors of a model, a checkpoint or a file, with formats, shapes and sizes, and totals.

    Nothing in a file is executed: of one that holds more than data the members of its zip archive are listed.
    """
    from hf_trainweights.inspection.listing import inspect_weights

    with errors_in_one_line(debug), status("reading"):
        inspection = inspect_weights(path)
    if as_json:
        print_json(asdict(inspection))
    else:
        _print_entries(inspection.entries)
    for file, calls in inspection.unsafe.items():
        say(f"warning: {file} was not unpickled: it would call {', '.join(calls)}", err=True)


def verify(path: ModelDirectory, as_json: AsJson = False, debug: Debug = False) -> None:
    """Read every weight file and compare it with its digest: a single flipped bit is found.

    Exits with 1 if a weight file is damaged or missing, if one is there that was not saved with the model, or if the
    quantization_config in config.json was edited.
    """
    from hf_trainweights import verify_model

    with errors_in_one_line(debug), status("verifying"):
        report = verify_model(path)
    if as_json:
        print_json({**asdict(report), "path": str(path)})
    else:
        typer.echo(f"{path}: {'intact' if report.ok else 'damaged'}, {len(report.files)} weight files")
        say(f"written by {', '.join(f'{package} {version}' for package, version in report.versions.items())}")
        if not report.covers_config:
            typer.echo("not covered: the quantization_config in config.json, of which the save kept no digest")
    foreign = [f"{path / name}: was not saved with the model" for name in report.foreign]
    exit_with([*(f"{path / name}: {problem}" for name, problem in report.problems.items()), *foreign])


def diff(
    first: Annotated[Path, typer.Argument(metavar="A", exists=True, help="A model, a checkpoint, or one weight file.")],
    second: Annotated[Path, typer.Argument(metavar="B", exists=True, help="What it is compared with.")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare two models tensor by tensor, float or quantized, or two weight files.

    Exits with 1 if one has keys, shapes or dtypes that the other has not.
    """
    from hf_trainweights.inspection.difference import compare_checkpoints
    from hf_trainweights.inspection.model_difference import compare_models

    are_models = all((path / "config.json").is_file() for path in (first, second))
    with errors_in_one_line(debug), status("comparing"):
        comparison = (compare_models if are_models else compare_checkpoints)(first, second)
    if as_json:
        print_json(comparison.to_dict())
    else:
        print_comparison(comparison)
    exit_with(comparison.problems)


def export(
    path: ModelDirectory,
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="The file to write: *.gguf, *.onnx, *.pt2; of compressed-tensors a directory."
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

    torchscript: one call of the model as a program, as torch.jit.load and libtorch read it.

    pt2: one call of the model as a program, as torch.export.load reads it.
    """
    if runtime is not None and to is not Layout.ONNX:
        raise typer.BadParameter(f"{to} has no runtimes; only onnx has.", param_hint="--runtime")
    loading_bars()
    with errors_in_one_line(debug), warnings.catch_warnings():
        _export(path, out, to, runtime or Runtime.PORTABLE)
    files = [out] if out.is_file() else [*out.glob("*.safetensors")]
    if to is Layout.ONNX:
        # Where large weights go.
        files += out.parent.glob(f"{out.name}.data")
    disk_bytes = sum(file.stat().st_size for file in files)
    if as_json:
        print_json({"source": str(path), "out": str(out), "layout": to, "disk_bytes": disk_bytes})
    else:
        typer.echo(f"{out}: {to}, {show_size(disk_bytes)}")


def _export(path: Path, out: Path, to: Layout, runtime: Runtime) -> None:
    import hf_trainweights

    # Tracers warn of Transformers' own code, which whoever runs a command cannot change.
    warnings.filterwarnings("ignore", message=".*trace.*")
    match to:
        case Layout.COMPRESSED_TENSORS:
            hf_trainweights.export_compressed_tensors(path, out)
        case Layout.GGUF:
            hf_trainweights.export_gguf(path, out)
        case Layout.ONNX:
            hf_trainweights.export_onnx(path, out, runtime=runtime.value)
        case Layout.TORCHSCRIPT:
            hf_trainweights.export_torchscript(path, out)
        case Layout.PT2:
            hf_trainweights.export_program(path, out)


def _read_rules(file: Path) -> dict[str, Any]:
    """Return overrides; TOML has no null, so false stands for it."""
    try:
        text = file.read_text(encoding="utf-8")
        rules = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{file} cannot be read: {error}", param_hint="--rules") from error
    if not isinstance(rules, dict):
        raise typer.BadParameter(f"{file} holds no table of names to formats.", param_hint="--rules")
    return {name: None if rule is False else rule for name, rule in rules.items()}


def _print_entries(entries: tuple[Entry, ...]) -> None:
    table = new_table("tensor", "format", right=("shape", "size"))
    for entry in entries:
        table.add_row(
            entry.name,
            entry.format,
            str(list(entry.shape)) if entry.shape is not None else "",
            show_size(entry.stored_bytes),
        )
    table.add_section()
    counts = Counter(entry.format for entry in entries)
    for shown, count in counts.most_common():
        table.add_row(f"{count} of", shown, "", _total(entry for entry in entries if entry.format == shown))
    table.add_row("total", "", "", _total(entries))
    print_table(table)


def _total(entries: Iterable[Entry]) -> str:
    from hf_trainweights.inspection.listing import total_bytes

    return show_size(total_bytes(entry.stored_bytes for entry in entries))
