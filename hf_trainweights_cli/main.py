"""The `trainweights` command as a whole."""

from __future__ import annotations

import typer

from hf_trainweights_cli import checkpoint, demo, import_, models, report

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
for command in (models.quantize, models.inspect, models.verify, models.diff, models.export, report.report, demo.demo):
    app.command()(command)
app.command("import")(import_.import_model)
app.add_typer(checkpoint.app, name="checkpoint")


def main() -> None:
    """Run the `trainweights` command."""
    app(prog_name="trainweights")


@app.callback()
def _root() -> None:
    """Small weights and small training checkpoints for Hugging Face Transformers.

    Exit codes: 0 if all is well, 1 for a problem found or an error, 2 for wrong usage.
    """
