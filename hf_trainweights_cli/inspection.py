"""`trainweights inspect`, `verify` and `diff`: the commands that read saved models and change no file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from hf_trainweights_cli.console import AsJson, Debug, errors_in_one_line, exit_with, print_json, say, status
from hf_trainweights_cli.differences import Top, show_comparison
from hf_trainweights_cli.sources import Model, local_copy
from hf_trainweights_cli.tables import Table, print_table, show_size

if TYPE_CHECKING:
    from hf_trainweights.inspection.listing import Entry

_LARGEST = 10

Weights = Annotated[
    str, typer.Argument(metavar="PATH", help="A model or checkpoint directory, a weight file, or a Hub id.")
]


def inspect(
    path: Weights,
    tensors: Annotated[bool, typer.Option("--tensors", help="One line for each tensor.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show which formats the weights of a model, a checkpoint or a file have, their sizes, and the largest tensors.

    Nothing in a file is executed: of one that holds more than data the members of its zip archive are listed.
    """
    from hf_trainweights.inspection.listing import inspect_weights
    from hf_trainweights.kernels import compiled
    from hf_trainweights.models.choosing.summary import Calibrated

    with errors_in_one_line(debug), status("reading"):
        local = local_copy(path)
        inspection, calibrated = inspect_weights(local), Calibrated.beside(local)
    if as_json:
        entries = [asdict(entry) for entry in inspection.entries]
        print_json(
            {
                "path": path,
                "tensors": entries,
                "unsafe": inspection.unsafe,
                "products": compiled.describe(),
                "calibrated": calibrated and asdict(calibrated),
            }
        )
    else:
        _print_formats(inspection.entries)
        if calibrated is not None:
            typer.echo(calibrated)
        typer.echo(f"on this machine: {compiled.describe()}\n")
        _print_tensors(inspection.entries, None if tensors else _LARGEST)
    for file, calls in inspection.unsafe.items():
        say(f"warning: {file} was not unpickled: it would call {', '.join(calls)}", err=True)


def verify(path: Model, as_json: AsJson = False, debug: Debug = False) -> None:
    """Read every weight file and compare it with its digest: a single flipped bit is found.

    Exits with 1 if a weight file is damaged or missing, if one is there that was not saved with the model, or if the
    quantization_config in config.json was edited, or if the model would not find its weights.
    """
    from hf_trainweights import verify_model

    with errors_in_one_line(debug), status("verifying"):
        directory = local_copy(path)
        report = verify_model(directory)
    if as_json:
        print_json({**asdict(report), "path": path, "ok": report.ok})
    else:
        say(f"{path}: {'intact' if report.ok else 'damaged'}, {len(report.files)} weight files")
        say(f"written by {', '.join(f'{package} {version}' for package, version in report.versions.items())}")
        if not report.covers_config:
            typer.echo("not covered: the quantization_config in config.json, of which the save kept no digest")
        if report.unchecked:
            typer.echo(f"not checked: whether the model finds its weights: {report.unchecked}")
    foreign = [f"{directory / name}: was not saved with the model" for name in report.foreign]
    exit_with([*(f"{directory / name}: {problem}" for name, problem in report.problems.items()), *foreign])


def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A model, a checkpoint, one weight file, or a Hub id.")],
    second: Annotated[str, typer.Argument(metavar="B", help="What it is compared with.")],
    top: Top = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare two models tensor by tensor, float or quantized, or two weight files, the largest error first.

    Exits with 1 if one has names, shapes or dtypes that the other has not.
    """
    from hf_trainweights.inspection.difference import compare_checkpoints, compare_models

    with errors_in_one_line(debug), status("comparing"):
        paths = local_copy(first), local_copy(second)
        are_models = all((path / "config.json").is_file() for path in paths)
        comparison = (compare_models if are_models else compare_checkpoints)(*paths)
    show_comparison(comparison, top, as_json=as_json)


def _print_formats(entries: Sequence[Entry]) -> None:
    groups: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[entry.format].append(entry)
    table = Table(("format",), right=("tensors", "size"))
    for shown, group in sorted(groups.items(), key=lambda item: -len(item[1])):
        table.add_row(shown, len(group), _total(group))
    table.add_section()
    table.add_row("total", len(entries), _total(entries))
    print_table(table)


def _print_tensors(entries: Sequence[Entry], count: int | None) -> None:
    """Print the `count` largest tensors, or if it is None, all tensors in the order of the files."""
    by_size = sorted(entries, key=lambda entry: entry.stored_bytes or 0, reverse=True)
    table = Table(("tensor", "format"), right=("shape", "size"), drop=("shape", "format"))
    for entry in entries if count is None else by_size[:count]:
        shape = str(list(entry.shape)) if entry.shape is not None else ""
        table.add_row(entry.name, entry.format, shape, show_size(entry.stored_bytes))
    print_table(table)
    if count is not None and len(entries) > count:
        typer.echo(f"and {len(entries) - count} smaller ones; --tensors shows them all")


def _total(entries: Iterable[Entry]) -> str:
    from hf_trainweights.inspection.listing import total_bytes

    return show_size(total_bytes(entry.stored_bytes for entry in entries))
