"""Puts together the `trainweights` command from its subcommands."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Annotated

import typer

from hf_trainweights_cli import checkpoint, export, import_, inspection, push, quantize, report, run
from hf_trainweights_cli.commands import AfterCommand, Command, new_app
from hf_trainweights_cli.demo.command import demo

app = new_app()
for command in (
    quantize.quantize,
    quantize.dequantize,
    inspection.inspect,
    inspection.verify,
    inspection.diff,
    export.export,
    push.push,
    report.report,
    demo,
):
    app.command(cls=Command)(command)
app.command("import", cls=Command)(import_.import_model)
app.command(cls=run.RunCommand)(run.run)
app.add_typer(checkpoint.app, name="checkpoint")


def main() -> None:
    """Run the `trainweights` command."""
    try:
        app(prog_name="trainweights")
    except AfterCommand as end:
        call = end.call
    else:
        return
    call()  # outside of the except clause, so that its errors do not have AfterCommand as context


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trainweights {version('hf_trainweights')}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Small weights and small training checkpoints for Hugging Face Transformers.

    Exit codes: 0 if all is well, 1 for a problem found or an error, 2 for wrong usage, 130 after an interrupt.
    """
    # OpenMP threads spin while they wait for each other. While other programs kept the cores busy, spinning doubled the
    # processor time of `quantize`, which also took half as long again. `demo` and `run` may generate text, which takes
    # many short products; for these, waiting without spinning is slower.
    if context.invoked_subcommand not in ("demo", "run"):
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
