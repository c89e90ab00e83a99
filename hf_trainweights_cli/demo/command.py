"""The subcommand `trainweights demo`: its options, its progress lines and its output on the terminal."""

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
    from hf_trainweights_cli.demo.checkpoints import Checkpoints
    from hf_trainweights_cli.demo.run import Result


def demo(
    model: Annotated[
        str | None,
        typer.Option(metavar="PATH_OR_ID", help="Your own causal language model instead of one trained here."),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", metavar="NAME", help="Measure this format, not the usual four; may be repeated."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="Number of training steps.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, metavar="N", help="Seed of the training.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the models in this new or empty directory.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the results into this HTML file.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train a small Llama on Python's standard library, quantize it to some formats, use it, save it, reload it.

    Without --format these are int8, float8_e4m3, int4 and coded. Then measure how fast a larger model decodes in each
    of them, and resume the training from a checkpoint. Nothing is downloaded. It takes about 90 seconds on two CPU
    cores, and exits with 1 if a reload is not bit-equal.
    """
    typer.echo("Importing PyTorch and Transformers ...", err=True)
    # Imported here, so that `--help` does not wait for torch.
    from transformers.utils.logging import disable_progress_bar

    from hf_trainweights.formats import FORMATS
    from hf_trainweights.report.write import check_name, write_page
    from hf_trainweights_cli.demo.page import demo_page
    from hf_trainweights_cli.demo.run import USUAL_FORMATS, run_demo
    from hf_trainweights_cli.demo.training import Recipe

    unknown = set(formats or ()) - set(FORMATS)
    if unknown:
        raise typer.BadParameter(
            f"{', '.join(sorted(unknown))} is none of {', '.join(FORMATS)}.", param_hint="--format"
        )
    if model is not None and (steps is not None or seed is not None):
        raise typer.BadParameter("Nothing is trained with --model: leave out --steps and --seed.", param_hint="--model")
    training = {"steps": steps, "seed": seed}
    recipe = Recipe(**{key: value for key, value in training.items() if value is not None})
    disable_progress_bar()  # the demo's own lines already show the progress of loading
    with errors_in_one_line(debug), _directory(out) as directory, _ProgressLines() as progress:
        if html is not None:
            check_name(html)
        chosen = list(dict.fromkeys(formats or USUAL_FORMATS))
        result = run_demo(directory, chosen, recipe, progress.report, model=model, keep=out is not None)
        if html is not None:
            write_page(demo_page(result), html)
    if as_json:
        print_json(dataclasses.asdict(result) | {"failures": result.failures})
    else:
        _print_result(result, out, html)
    for failure in result.failures:
        typer.echo(f"FAILED {failure}", err=True)
    if result.failures:
        raise typer.Exit(1)


class _ProgressLines:
    """Progress on stderr: a line with a bar for the training and for each format, from its first report on.

    If stderr is no terminal, a line is printed for each quarter of the progress instead.
    """

    def __enter__(self) -> _ProgressLines:
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[stage]:<18}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._quarter = ("", 0)
        return self

    def __exit__(self, *exception: object) -> None:
        # If it has not started, stop() would print an empty line.
        if self._tasks:
            self._progress.stop()

    def report(self, line: str, stage: str, done: int, total: int) -> None:
        """Show the stage of one line, such as a format, and the number of steps done of the total."""
        if not self._progress.console.is_terminal:
            quarter = (line, 4 * done // total)
            if quarter != self._quarter:
                typer.echo(f"{line}: {stage} ({done} of {total})", err=True)
            self._quarter = quarter
            return
        if not self._tasks:
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


def _print_result(result: Result, out: Path | None, html: Path | None) -> None:
    console = Console(highlight=False)
    if result.losses:
        # Use the mean of the last steps, because losses of single batches vary much.
        last = statistics.fmean(result.losses[-20:])
        console.print(f"Trained for {len(result.losses)} steps: loss {result.losses[0]:.2f} to {last:.2f}")
    console.print(_quality_table(result))
    if result.speeds:
        console.print(_speed_table(result))
    if result.checkpoints:
        for line in _checkpoint_lines(result.checkpoints, result.losses):
            console.print(line)
    console.print(f"Each continues {result.prompt!r}:", markup=False)
    for row in result.rows:
        console.print(f"{row.format:<12} {row.sample!r}", markup=False, no_wrap=True, overflow="ellipsis")
    for text, path in (("The files are in", out), ("The pictures are in", html)):
        if path is not None:
            console.print(f"{text} {path}.", markup=False)


def _quality_table(result: Result) -> Table:
    # The model that the demo trains fits into the caches of a CPU, so its speed would tell nothing.
    numbers = ("on disk", "bits", "perplexity", "x smaller" if result.speeds else "tokens/s")
    table = _table(
        result.model,
        f"bits: of a weight in memory, scales included; perplexity: held-out files of the {result.held_out}",
        numbers,
    )
    table.add_column("reload", no_wrap=True)
    for row in result.rows:
        smaller = result.rows[0].disk_bytes / row.disk_bytes
        cells = [
            row.format,
            decimal(row.disk_bytes),
            f"{row.bits_per_weight:.2f}",
            f"{row.perplexity:.3f}",
            f"{smaller:.2f}" if result.speeds else f"{row.tokens_per_second:.1f}",
            "FAILED" if row.failures else "bit-equal",
        ]
        table.add_row(*cells)
    return table


def _speed_table(result: Result) -> Table:
    dtype = result.speeds[0].format
    caption = f"One token a call, in turns with the {dtype} model, whose time stands beside it, on {result.machine}."
    if any(row.times_faster < 1 for row in result.speeds):
        caption += " Below 1: smaller, but this CPU has no fast product for it."
    numbers = ("memory", "x smaller", "ms/token", f"{dtype} ms/token", "x faster")
    table = _table("Llama of 105M random weights", caption, numbers)
    for row in result.speeds:
        table.add_row(
            row.format,
            decimal(row.memory_bytes),
            f"{row.times_smaller:.2f}",
            f"{1e3 * row.token_seconds:.2f}",
            f"{1e3 * row.float_token_seconds:.2f}",
            f"{row.times_faster:.2f}",
        )
    return table


def _table(title: str, caption: str, numbers: tuple[str, ...]) -> Table:
    # A path may hold brackets, which are markup to rich.
    table = Table(title=escape(title), caption=escape(caption), title_justify="left", caption_justify="left")
    table.add_column("format", no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _checkpoint_lines(checkpoints: Checkpoints, losses: tuple[float, ...]) -> Iterator[str]:
    sizes = f"{decimal(checkpoints.plain_bytes)} -> {decimal(checkpoints.stored_bytes)}"
    ratio = checkpoints.plain_bytes / checkpoints.stored_bytes
    yield f"{len(checkpoints.saved)} {checkpoints.mode} checkpoints: {sizes}, {ratio:.2f}x smaller"
    if checkpoints.resumed_at is not None:
        steps = len(checkpoints.resumed_losses)
        resumed, went_on = checkpoints.resumed_losses[-1], losses[checkpoints.resumed_at + steps - 1]
        yield (
            f"Resumed from step {checkpoints.resumed_at}, {steps} steps later: loss {resumed:.4f}, "
            f"without the break {went_on:.4f}"
        )
        yield f"(at most {checkpoints.largest_difference:.1g} apart; mode lossless resumes with the same bits)"
