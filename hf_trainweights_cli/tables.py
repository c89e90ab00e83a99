"""Prints tables that fit into a terminal; in a pipe or file, a table is complete and each row is one line."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.filesize import decimal
from rich.measure import Measurement
from rich.table import Table as Drawing

from hf_trainweights_cli.console import printable

# Wider than any row: outside of a terminal, a row is never wrapped.
_UNLIMITED = 1 << 20


@dataclass
class Table:
    """Rows of text under a head, with empty lines between groups of rows.

    On a narrow terminal, columns are left out in the order of `drop`. If the names still do not fit beside the other
    columns, each row takes two lines. A name is never wrapped, but loses its middle if it is longer than a line.

    Args:
        left: Heads of the columns of text. The first column holds names, unless its head is in `labels`.
        right: Heads of the columns of numbers.
        drop: Heads of the columns to leave out on a narrow terminal, in this order.
        labels: Heads of the columns whose text may be wrapped.
    """

    left: Sequence[str]
    right: Sequence[str] = ()
    drop: Sequence[str] = ()
    labels: Sequence[str] = ()
    groups: list[list[tuple[str, ...]]] = field(default_factory=lambda: [[]])

    def add_row(self, *cells: object) -> None:
        """Add a row of cells, escaped and cut by `printable`."""
        self.groups[-1].append(tuple(map(printable, cells)))

    def add_section(self) -> None:
        """End a group of rows; an empty line follows."""
        self.groups.append([])

    def lines(self, width: int | None) -> list[str]:
        """Return the table as lines of at most `width` characters; None means no limit."""
        console = Console(width=width or _UNLIMITED, markup=False, emoji=False, highlight=False, force_terminal=False)
        for dropped in range(len(self.drop) + 1):
            drawing = self._draw(set(self.drop[:dropped]))
            measured = Measurement.get(console, console.options.update(max_width=_UNLIMITED), drawing)
            if measured.minimum <= console.width:
                break
        else:
            return self._stacked(console.width)
        with console.capture() as capture:
            console.print(drawing, width=min(measured.maximum, console.width))
        return [line.rstrip() for line in capture.get().splitlines()]

    def _draw(self, dropped: set[str]) -> Drawing:
        heads = (*self.left, *self.right)
        shown = [index for index, head in enumerate(heads) if head not in dropped]
        drawing = Drawing(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for index in shown:
            folds = heads[index] in self.labels
            cells = [row[index] for group in self.groups for row in group]
            # Set the width, because Rich would cut a column that does not wrap to its longest word.
            width = None if folds else max(map(cell_len, (heads[index], *cells)))
            justify = "left" if index < len(self.left) else "right"
            drawing.add_column(heads[index], justify=justify, no_wrap=not folds, min_width=width)
        for group in filter(None, self.groups):
            for row in group:
                drawing.add_row(*(row[index] for index in shown))
            drawing.add_section()
        return drawing

    def _stacked(self, width: int) -> list[str]:
        """Return two lines for each row: the name, and below it the other columns that fit into a line."""
        rows = [row for group in self.groups for row in group]
        below: dict[tuple[str, ...], str] = {}
        for dropped in range(len(self.drop) + 1):
            below = {row: self._below(row, self.drop[:dropped]) for row in rows}
            if max(map(cell_len, below.values())) <= width:
                break
        lines = []
        for group in filter(None, self.groups):
            lines += [line for row in group for line in (shorten(row[0], width), below[row]) if line]
            lines.append("")
        return lines[:-1]

    def _below(self, row: tuple[str, ...], dropped: Sequence[str]) -> str:
        cells = zip((*self.left, *self.right)[1:], row[1:], strict=True)
        shown = "  ".join(f"{head} {cell}" for head, cell in cells if cell and head not in dropped)
        return f"  {shown}" if shown else ""


def shorten(name: str, width: int) -> str:
    """Cut the middle out of a name that is longer than a line; the middle tells least."""
    if len(name) <= width:
        return name
    head = max(0, width - 3) // 2
    tail = max(0, width - 3 - head)
    return f"{name[:head]}...{name[len(name) - tail :]}"


def print_table(table: Table) -> None:
    """Print a table on stdout, fitted to the terminal, or complete if stdout is no terminal."""
    width = Console().width if sys.stdout.isatty() else None
    typer.echo("\n".join(table.lines(width)))


def print_note(text: str) -> None:
    """Print a line of explanation on stdout; on a terminal, wrap it between words."""
    typer.echo(textwrap.fill(text, Console().width) if sys.stdout.isatty() else text)


def show_size(count: int | None) -> str:
    """Return a number of bytes as text with a unit; `?` for None."""
    if count is None:
        return "?"
    return decimal(count) if count >= 1000 else f"{count} B"


def show_sizes(plain_bytes: int, stored_bytes: int) -> tuple[str, str, str]:
    """Return two sizes and their ratio as texts."""
    ratio = f"{plain_bytes / stored_bytes:.2f}" if stored_bytes and plain_bytes else ""
    return show_size(plain_bytes), show_size(stored_bytes), ratio


def show_error(value: Any) -> str:
    """Return an error as text with two digits; `-` for None, an error that could not be measured."""
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"
