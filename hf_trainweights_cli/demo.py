"""`trainweights demo`."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from hf_trainweights_cli.console import AsJson, Debug, errors_in_one_line, print_json

if TYPE_CHECKING:
    from hf_trainweights.demo.run import Result


def demo(
    model: Annotated[
        str | None,
        typer.Option(metavar="PATH_OR_ID", help="Your own causal language model instead of one trained here."),
    ] = None,
    formats: Annotated[
        list[str] | None, typer.Option("--format", metavar="NAME", help="Only this format; may be repeated.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="Number of training steps.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, metavar="N", help="Seed of the training.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the models in this new or empty directory.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train a small Llama on Python's standard library, quantize it to each format, use it, save it, reload it.

    Nothing is downloaded. It takes about two minutes on two CPU cores, and exits with 1 if a reload is not bit-equal.
    """
    # Imported here, so that `--help` does not wait for torch.
    from hf_trainweights.demo.run import run_demo
    from hf_trainweights.demo.training import Recipe
    from hf_trainweights.formats import FORMATS

    unknown = set(formats or ()) - set(FORMATS)
    if unknown:
        raise typer.BadParameter(
            f"{', '.join(sorted(unknown))} is none of {', '.join(FORMATS)}.", param_hint="--format"
        )
    if model is not None and (steps is not None or seed is not None):
        raise typer.BadParameter("Nothing is trained with --model: leave out --steps and --seed.", param_hint="--model")
    training = {"steps": steps, "seed": seed}
    recipe = Recipe(**{key: value for key, value in training.items() if value is not None})
    with errors_in_one_line(debug), _directory(out) as directory, _ProgressLines() as progress:
        chosen = list(dict.fromkeys(formats or FORMATS))
        result = run_demo(directory, chosen, recipe, progress.report, model=model, keep=out is not None)
    if as_json:
        print_json(dataclasses.asdict(result) | {"failures": result.failures})
    else:
        _print_result(result, out)
    for failure in result.failures:
        typer.echo(f"FAILED {failure}", err=True)
    if result.failures:
        raise typer.Exit(1)


class _ProgressLines:
    """One line with a bar for the training and for each format, on stderr; it appears with the first report."""

    def __enter__(self) -> _ProgressLines:
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[stage]:<18}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        return self

    def __exit__(self, *exception: object) -> None:
        # Without a start, stop() would print an empty line.
        if self._tasks:
            self._progress.stop()

    def report(self, line: str, stage: str, done: int, total: int) -> None:
        """Show the progress of one line.

        Args:
            line: Name of the line, e.g. a format.
            stage: The current stage.
            done: Steps done.
            total: Steps in all.
        """
        if not self._tasks:
            from transformers.utils.logging import disable_progress_bar

            # These lines show the progress of loading too; Transformers' own bars would overwrite them.
            disable_progress_bar()
            self._progress.start()
        if line not in self._tasks:
            self._tasks[line] = self._progress.add_task(line, stage=stage)
        self._progress.update(self._tasks[line], stage=stage, completed=done, total=total)


@contextlib.contextmanager
def _directory(out: Path | None) -> Iterator[Path]:
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="trainweights-") as directory:
        yield Path(directory)


def _print_result(result: Result, out: Path | None) -> None:
    console = Console(highlight=False)
    if result.losses:
        # The mean of the last steps: a single batch says little.
        last = statistics.fmean(result.losses[-20:])
        console.print(f"Trained for {len(result.losses)} steps: loss {result.losses[0]:.2f} to {last:.2f}")
    table = Table(
        # A path may hold brackets, which are markup to rich.
        title=escape(result.model),
        caption=f"Perplexity: held-out files of the {result.held_out}",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("format", no_wrap=True)
    for name in ("on disk", "bits/weight", "perplexity", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("reload")
    for row in result.rows:
        table.add_row(
            row.format,
            decimal(row.disk_bytes),
            f"{row.bits_per_weight:.2f}",
            f"{row.perplexity:.3f}",
            f"{row.tokens_per_second:.1f}",
            "FAILED" if row.failures else "bit-equal",
        )
    console.print(table)
    console.print(f"Each continues {result.prompt!r}:", markup=False)
    for row in result.rows:
        console.print(f"{row.format:<12} {row.sample!r}", markup=False, no_wrap=True, overflow="ellipsis")
    if out is not None:
        console.print(f"The models are in {out}.", markup=False)
