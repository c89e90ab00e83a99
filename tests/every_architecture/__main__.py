"""Asks every architecture of Transformers what this package promises: `PYTHONPATH=tests python -m tests.every_architecture`.

It prints a line for each class and writes the results after each, so that a run that was stopped goes on where it was.
The exit code is 1 if a cell is red, or, with `--new-since`, if one is that was not.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]  # as pytest has it

from every_architecture.cells import CELLS  # noqa: E402 (it lies on the path above)
from every_architecture.models import architectures, one_of_each_type  # noqa: E402
from every_architecture.worker import SECONDS, ask  # noqa: E402

from benchmarks.machine import commit, versions  # noqa: E402

RESULT = TESTS.parent / "benchmarks" / "results" / "every_architecture.json"


def main() -> int:
    """Ask, print, record, and return the exit code."""
    options = _options()
    chosen = architectures() if options.all else one_of_each_type()
    chosen = [each for each in chosen if re.search(options.only, str(each))]
    cells = [name for name in CELLS if re.search(options.cells, name)]
    before = json.loads(options.new_since.read_bytes())["rows"] if options.new_since else {}
    report = _report(options.record)
    rows = report["rows"]
    for number, architecture in enumerate(chosen, 1):
        name = str(architecture)
        missing = [cell for cell in cells if cell not in rows.get(name, {}).get("cells", {})]
        if not missing:
            continue
        answer = ask(architecture, missing, options.seconds)
        answer["cells"] = {**rows.get(name, {}).get("cells", {}), **answer.get("cells", {})}
        rows[name] = answer
        print(f"{number}/{len(chosen)} {name}: {_line(answer)}", flush=True)
        if options.record:
            options.record.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.every_architecture", description=__doc__)
    parser.add_argument("--only", default="", metavar="PATTERN", help="of model types and classes")
    parser.add_argument("--cells", default="", metavar="PATTERN", help="of what is asked")
    parser.add_argument("--all", action="store_true", help="all classes, not one of each model type")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for one class")
    parser.add_argument("--record", type=Path, help="write the results to this file, and leave out what it has")
    parser.add_argument("--new-since", type=Path, metavar="FILE", help="show what another file says otherwise")
    return parser.parse_args()


def _report(path: Path | None) -> dict[str, Any]:
    if path and path.exists():
        return json.loads(path.read_bytes())
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"date": today, "commit": commit(), "versions": versions("peft", "compressed-tensors"), "rows": {}}


def _line(answer: dict[str, Any]) -> str:
    """Return the counts of a class, and its red cells."""
    if answer["built"] is not True:
        return f"not built: {answer['built']}"
    outcomes = answer["cells"]
    counts = [f"{sum(text.startswith(kind) for text in outcomes.values())} {kind}" for kind in ("right", "refused", "RED")]
    red = "".join(f"\n    {cell}: {text}" for cell, text in outcomes.items() if text.startswith("RED"))
    notes = [key for key in ("not run", "not read by Transformers", "not reloaded by Transformers") if key in answer]
    return ", ".join(counts + notes) + red


if __name__ == "__main__":
    sys.exit(main())
