"""Tables that fit a terminal, and that are whole where something else reads them: each row is one line then."""

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

# Wider than any row; what is not on a terminal is never wrapped.
_UNLIMITED = 1 << 20


@dataclass
class Table:
    """Rows of text under a head, with empty lines between groups of rows.

    On a terminal that is too narrow, columns are left out in the order of `drop`. Names never break: where they still
    do not fit beside the other columns, each row takes two lines. Only a name that is longer than a whole line loses
    its middle.

    Args:
        left: Heads of the columns of text. The first holds names, if `labels` does not say otherwise.
        right: Heads of the columns of numbers.
        drop: Heads of the columns that a narrow terminal does without, the first one first.
        labels: Heads of the columns of text that may take several lines.
    """

    left: Sequence[str]
    right: Sequence[str] = ()
    drop: Sequence[str] = ()
    labels: Sequence[str] = ()
    groups: list[list[tuple[str, ...]]] = field(default_factory=lambda: [[]])

    def add_row(self, *cells: object) -> None:
        """Add a row; its cells are shown as `printable` shows them."""
        self.groups[-1].append(tuple(map(printable, cells)))

    def add_section(self) -> None:
        """End a group of rows."""
        self.groups.append([])

    def lines(self, width: int | None) -> list[str]:
        """Return the table as text, for a terminal of so many columns; None is no limit."""
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
        kept = [index for index, head in enumerate(heads) if head not in dropped]
        drawing = Drawing(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for index in kept:
            folds = heads[index] in self.labels
            cells = [row[index] for group in self.groups for row in group]
            # Rich would cut a column that does not wrap to its longest word.
            width = None if folds else max(map(cell_len, (heads[index], *cells)))
            justify = "left" if index < len(self.left) else "right"
            drawing.add_column(heads[index], justify=justify, no_wrap=not folds, min_width=width)
        for group in filter(None, self.groups):
            for row in group:
                drawing.add_row(*(row[index] for index in kept))
            drawing.add_section()
        return drawing

    def _stacked(self, width: int) -> list[str]:
        """Return two lines for each row: the name, and below it as many of the other columns as a line holds."""
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
    """Return a name that is longer than a line without its middle, which says least; others as they are."""
    if len(name) <= width:
        return name
    head = max(0, width - 3) // 2
    tail = max(0, width - 3 - head)
    return f"{name[:head]}...{name[len(name) - tail :]}"


def print_table(table: Table) -> None:
    """Print a table on stdout, as wide as the terminal allows, or whole where stdout is none."""
    width = Console().width if sys.stdout.isatty() else None
    typer.echo("\n".join(table.lines(width)))


def print_note(text: str) -> None:
    """Print a line of explanation on stdout; on a terminal it is broken between words."""
    typer.echo(textwrap.fill(text, Console().width) if sys.stdout.isatty() else text)


def show_size(count: int | None) -> str:
    """Return a number of bytes as people read it; `?` for None."""
    if count is None:
        return "?"
    return decimal(count) if count >= 1000 else f"{count} B"


def show_sizes(plain_bytes: int, stored_bytes: int) -> tuple[str, str, str]:
    """Return two sizes and their ratio."""
    ratio = f"{plain_bytes / stored_bytes:.2f}" if stored_bytes and plain_bytes else ""
    return show_size(plain_bytes), show_size(stored_bytes), ratio


def show_error(value: Any) -> str:
    """Return an error with two digits; `-` for None, where there is none to measure."""
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"
