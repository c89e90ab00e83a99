"""The commands of tests that run for as long as a user likes: `python -m tests.fuzz`, `tests.soak` and `tests.mutants`.

They have the same options, print tables alike, and write records that name the commit and the machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import commit, cpu_name, versions


def parser_of(module: str, description: str | None, subjects: str, names: Collection[str]) -> argparse.ArgumentParser:
    """Return the parser of a command with the options that all have; `subjects` is the option that chooses `names`."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.{module}", description=description)
    metavar = subjects.removesuffix("s").upper()
    parser.add_argument(f"--{subjects}", nargs="+", choices=names, default=list(names), metavar=metavar)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="write the result to this JSON file")
    return parser


def add_time(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that runs for some time in several processes."""
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows of equal keys: first a name, then numbers, and below them the sum of each column, or its peak."""
    if not rows:
        return
    name, *columns = rows[0]
    sums: dict[str, Any] = {name: "together"}
    for column in columns:
        sums[column] = (max if column.startswith("peak") else sum)(row[column] for row in rows)
    print(f"{name:24}", *(f"{column:>11}" for column in columns))
    for row in (*rows, sums):
        print(f"{row[name]:24}", *(f"{row[column]:11,}" for column in columns))


def write_record(path: Path | None, options: argparse.Namespace, rows: Sequence[Any], **facts: Any) -> None:
    """Write the rows and the facts of a run as JSON, if there is a path for them."""
    if path is None:
        return
    record = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "versions": versions()},
        **{name: value for name, value in vars(options).items() if name in ("seconds", "seed")},
        **facts,
        "rows": list(rows),
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
