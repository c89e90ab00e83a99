"""Markdown tables."""

from __future__ import annotations


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table, its first column to the left and the others to the right.

    Args:
        header: One cell a column.
        rows: As many cells each.
    """
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
