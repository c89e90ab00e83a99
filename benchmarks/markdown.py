"""Markdown tables."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"[^\w(]?\d")


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table, its columns with numbers to the right, except for the first, and others to the left.

    Args:
        header: One cell a column.
        rows: As many cells each.
    """
    columns = list(zip(*rows, strict=True))[1:] or [()] * (len(header) - 1)
    marks = ["---:" if any(map(_NUMBER.match, column)) else "---" for column in columns]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---", *marks], *rows))
