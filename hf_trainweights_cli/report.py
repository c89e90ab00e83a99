"""`trainweights report`: writes a report on a model or a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_trainweights_cli.console import AsJson, Debug, errors_in_one_line, print_json, say, status
from hf_trainweights_cli.sources import local_copy, read_texts


def report(
    source: Annotated[
        str, typer.Argument(metavar="A", help="A model (directory or Hub id), a run, a checkpoint, or a weight file.")
    ],
    against: Annotated[
        str | None, typer.Argument(metavar="[B]", help="The model that errors are measured against: the float one.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file to write; <name of A>-report.html if not given.")
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Texts, one a line, that A and B read: how far A's outputs are off."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Draw what lies in a model or a training run into one HTML file, and print the main figures.

    Of a model: sizes, bits and errors layer by layer, and histograms of the worst weights. Of a run: what each
    checkpoint takes, and the loss. The file needs nothing else to be read.
    """
    # Imported here, so that `--help` does not wait for torch.
    from hf_trainweights.report.write import write_report

    read = None if texts is None else read_texts(texts, "--texts")
    out = html or Path(f"{Path(source).absolute().name}-report.html")
    with errors_in_one_line(debug), status(f"reading {source}"):
        other = None if against is None else local_copy(against)
        written = write_report(local_copy(source), out, other, read)
    if as_json:
        print_json({"title": written.title, "file": str(written.file), "lines": list(written.lines)})
        return
    for line in str(written).splitlines():
        say(line)
