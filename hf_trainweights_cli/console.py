"""Helpers that all commands share: options, exit codes, errors in one line, JSON, tables and progress."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from hf_trainweights.inspection.difference import Comparison

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

_SHOWN_CHARACTERS = 2000


@contextlib.contextmanager
def errors_in_one_line(debug: bool) -> Iterator[None]:
    """Print an expected error in one line and exit with 1; with `debug`, raise it."""
    try:
        yield
    except Exception as error:
        from hf_trainweights.errors import TrainWeightsError

        if debug or not isinstance(error, TrainWeightsError | OSError):
            raise
        typer.echo(f"error: {one_line(error)}", err=True)
        raise typer.Exit(1) from error


def exit_with(problems: Sequence[str]) -> None:
    """Print each problem in a line and exit with 1; return if there are none."""
    for problem in problems:
        typer.echo(f"problem: {one_line(problem)}", err=True)
    if problems:
        raise typer.Exit(1)


def one_line(text: object) -> str:
    """Return a text without its line breaks, as `printable` shows it."""
    return printable(" ".join(str(text).split()))


def printable(text: object) -> str:
    """Return a text that moves no cursor and changes no color: what comes from a file may be anything.

    Characters that are not printable are escaped, and beyond 2000 of them the text is cut.
    """
    shown = str(text)
    if len(shown) > _SHOWN_CHARACTERS:
        shown = f"{shown[:_SHOWN_CHARACTERS]}..."
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in shown)


def say(text: object, *, err: bool = False) -> None:
    """Print a line as `printable` shows it."""
    typer.echo(printable(text), err=err)


def print_json(value: Any) -> None:
    """Print JSON values; NaN and infinities, which JSON cannot hold, become null."""
    typer.echo(json.dumps(_finite(value), indent=2))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _PlainTable(Table):
    """A table whose cells are texts that are shown as `printable` shows them."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*map(printable, cells), **options)


def new_table(*left: str, right: Sequence[str]) -> Table:
    """Return an empty table: columns of text, the first of which folds, then columns of numbers."""
    table = _PlainTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    for index, name in enumerate(left):
        table.add_column(name, overflow="fold", no_wrap=index > 0)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def print_table(table: Table) -> None:
    """Print a table on stdout, its cells as they are: brackets in them are no markup."""
    Console(highlight=False, markup=False).print(table)


def show_size(count: int | None) -> str:
    """Return a number of bytes as people read it; `?` for None."""
    if count is None:
        return "?"
    return decimal(count) if count >= 1000 else f"{count} B"


def show_sizes(plain_bytes: int, stored_bytes: int) -> tuple[str, str, str]:
    """Return two sizes and their ratio."""
    ratio = f"{plain_bytes / stored_bytes:.2f}" if stored_bytes and plain_bytes else ""
    return show_size(plain_bytes), show_size(stored_bytes), ratio


def print_comparison(comparison: Comparison) -> None:
    """Print a row of differences for each tensor, then the totals."""
    table = new_table("tensor", right=("mean", "L2", "largest", "A", "B"))
    for rows in (comparison.tensors, comparison.totals):
        for row in (each.to_dict() for each in rows):
            errors = (row[name] for name in ("relative_mean", "relative_l2", "largest"))
            numbers = ["-" if error is None else "0" if error == 0 else f"{error:.1e}" for error in errors]
            table.add_row(row["key"], *numbers, *(show_size(row[name]) for name in ("bytes_a", "bytes_b")))
        table.add_section()
    print_table(table)
    typer.echo("mean: mean(a - b) / mean(a); L2: |a - b| / |a|; largest: |a - b|; A, B: on disk")


def with_progress(action: str, directories: Sequence[Path]) -> Iterator[Path]:
    """Yield the directories; on a terminal, show `action` with the current one and how many are done."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(directories))
        for done, directory in enumerate(directories):
            progress.update(task, description=printable(f"{action} {directory.absolute().name}"), completed=done)
            yield directory


def status(action: str) -> AbstractContextManager[object]:
    """Return a context that shows `action` with a spinner if stderr is a terminal, and turns other bars off."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return Console(stderr=True).status(action)


def loading_bars() -> None:
    """Turn off the bars of Transformers unless stderr is a terminal, so that log files stay free of them."""
    if not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
