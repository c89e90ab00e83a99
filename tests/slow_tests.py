"""Which tests `make quick` leaves out by measurement: `make slow-tests` times all tests and writes slow_tests.txt.

A function is slow if its cases together take more than a 5000th of the whole suite, however fast the machine. Of a slow
function whose cases are all short, quick runs take the first case; of the others, none.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

SLOW_TESTS = Path(__file__).with_suffix(".txt")
SHARE = 1 / 5000

# Name and seconds of each.
Cases = Sequence[tuple[str, float]]


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that a quick run leaves out.

    Args:
        items: All tests, in order.
    """
    cases_to_run = dict(line.split() for line in SLOW_TESTS.read_text(encoding="utf-8").splitlines())
    seen = set()
    for item in items:
        name = item.name.partition("[")[0]
        is_first = (item.path, name) not in seen
        seen.add((item.path, name))
        if name in cases_to_run and not (cases_to_run[name] == "first" and is_first):
            item.add_marker(pytest.mark.slow)


def slow_functions(whole: Cases, *quick: Cases) -> dict[str, str]:
    """Return the names of slow functions, each with the cases of it that a quick run takes: "first" or "none".

    Args:
        whole: Each case of the whole suite.
        quick: Each case of runs without tests that are slow there: what a fixture takes is counted with its first user.
    """
    limit_seconds = SHARE * sum(seconds for _, seconds in whole)
    slow = {}
    for cases in (whole, *quick):
        seconds_of = defaultdict(list)
        for name, seconds in cases:
            # By name alone, so that a test may move to another file: names are sentences, and few are there twice.
            seconds_of[name.partition("[")[0]].append(seconds)
        slow |= {
            name: "none" if max(found) > limit_seconds else "first"
            for name, found in seconds_of.items()
            if sum(found) > limit_seconds
        }
    return dict(sorted(slow.items()))


def main() -> None:
    reports = (ET.parse(file).iter("testcase") for file in sys.argv[1:])
    runs = ([(case.attrib["name"], float(case.attrib["time"])) for case in report] for report in reports)
    lines = (f"{name} {cases_to_run}\n" for name, cases_to_run in slow_functions(*runs).items())
    SLOW_TESTS.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
