"""Asks every architecture of Transformers what this package promises: `python -m tests.every_architecture`.

It prints a line for each class. With `--record` it writes the results after each, and a run that was stopped goes on
where it was. The exit code is 1 if a cell is red that the file of `--new-since` does not call red.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]  # as pytest has it

from every_architecture.cells import CELLS  # noqa: E402 (it lies on the path above)
from every_architecture.models import architectures, one_of_each_type  # noqa: E402
from every_architecture.worker import RED, SECONDS, Answer, ask, warm_up  # noqa: E402

from benchmarks.machine import commit, versions  # noqa: E402


def main() -> int:
    """Ask, print, record, and return the exit code."""
    options = _options()
    chosen = architectures() if options.all else one_of_each_type()
    names = {str(each): each for each in chosen if re.search(options.only, str(each))}
    cells = [name for name in CELLS if re.search(options.cells, name)]
    known = json.loads(options.new_since.read_bytes())["rows"] if options.new_since else {}
    report, is_worse = _report(options.record), False
    rows: dict[str, Answer] = report["rows"]
    warm_up()
    for number, (name, architecture) in enumerate(names.items(), 1):
        answered = rows.get(name, {}).get("cells", {})
        missing = [cell for cell in cells if cell not in answered]
        if missing:
            answer = ask(architecture, missing, options.seconds)
            rows[name] = answer | {"cells": answered | answer["cells"]}
            _write(report, options.record)
        news = changes(rows[name], known.get(name, {}))
        is_worse |= any(text.startswith(RED) for text in news.values())
        if missing or news:
            print(f"{number}/{len(names)} {name}: {_summary(rows[name], news)}", flush=True)
    return int(is_worse)


def changes(answer: Answer, before: Answer) -> dict[str, str]:
    """Return the outcomes of a class that are not those of an earlier answer; of a new class those that are red."""
    old = before.get("cells")
    if old is None:
        return {cell: text for cell, text in answer["cells"].items() if text.startswith(RED)}
    return {cell: text for cell, text in answer["cells"].items() if _kind(text) != _kind(old.get(cell, text))}


def _kind(outcome: str) -> str:
    return re.split("[:,]", outcome, maxsplit=1)[0]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.every_architecture", description=__doc__)
    parser.add_argument("--only", default="", metavar="PATTERN", help="of model types and classes")
    parser.add_argument("--cells", default="", metavar="PATTERN", help="of what is asked")
    parser.add_argument("--all", action="store_true", help="all classes, not one of each model type")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for one class")
    parser.add_argument("--record", type=Path, help="write the results to this file, and leave out what it has")
    parser.add_argument("--new-since", type=Path, metavar="FILE", help="compare with the results in a file")
    return parser.parse_args()


def _report(path: Path | None) -> dict[str, Any]:
    if path and path.exists():
        return json.loads(path.read_bytes())
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"date": today, "commit": commit(), "versions": versions("peft", "compressed-tensors"), "rows": {}}


def _write(report: dict[str, Any], path: Path | None) -> None:
    """Write a report with a line for each class, beside the file and then over it."""
    if path is None:
        return
    head = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in report.items() if key != "rows"]
    rows = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(report["rows"].items())]
    text = "{\n" + ",\n".join([*head, '"rows": {\n' + ",\n".join(rows) + "\n}"]) + "\n}\n"
    temporary = path.with_suffix(".new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _summary(answer: Answer, news: dict[str, str]) -> str:
    """Return the counts of a class, and the outcomes that are new."""
    if answer["built"] is not True:
        return f"not built: {answer['built']}"
    counts = Counter(map(_kind, answer["cells"].values()))
    notes = [key for key in answer if key.startswith("not ")]
    new = "".join(f"\n    {cell}: {text}" for cell, text in news.items())
    return ", ".join([*(f"{count} {kind}" for kind, count in counts.items()), *notes]) + new


if __name__ == "__main__":
    sys.exit(main())
