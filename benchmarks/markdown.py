"""Markdown tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

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


def listed(records: Iterable[Mapping[str, Any]], columns: Mapping[str, str | Callable[[Any], str]]) -> str:
    """Return a Markdown table with a row for each record.

    Args:
        records: The values of each row, by name.
        columns: By the header of the column, a format of a record's values such as `"{bits:.2f}"`, or a function.
    """
    rows = [
        [column.format(**record) if isinstance(column, str) else column(record) for column in columns.values()]
        for record in records
    ]
    return table([*columns], rows)
