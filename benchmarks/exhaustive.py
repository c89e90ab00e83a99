"""What the last exhaustive run of the tests found: `python -m benchmarks.exhaustive build/exhaustive.xml`.

`make exhaustive` calls it with the report that pytest wrote. The last run of each kind of machine stays: none can run
the cases of all.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.machine import cpu_flags, cpu_name, versions

RESULT = Path(__file__).parent / "results" / "exhaustive.json"


def summary(report: Path) -> dict[str, object]:
    """Return the counts, minutes and date of a JUnit report, and this machine, on which pytest wrote it."""
    suite = next(ElementTree.parse(report).iter("testsuite"))
    counts = {name: int(suite.attrib[name]) for name in ("tests", "skipped", "failures", "errors")}
    return {
        "date": suite.attrib["timestamp"][:10],
        "machine": cpu_name(),
        "flags": cpu_flags(),
        "versions": {name: found for name, found in versions().items() if name in ("torch", "transformers")},
        "passed": counts["tests"] - counts["skipped"] - counts["failures"] - counts["errors"],
        "skipped": counts["skipped"],
        "failed": counts["failures"] + counts["errors"],
        "minutes": round(float(suite.attrib["time"]) / 60, 1),
    }


if __name__ == "__main__":
    run = summary(Path(sys.argv[1]))
    others = [each for each in json.loads(RESULT.read_text(encoding="utf-8")) if each["machine"] != run["machine"]]
    RESULT.write_text(json.dumps([*others, run], indent=1) + "\n", encoding="utf-8")
