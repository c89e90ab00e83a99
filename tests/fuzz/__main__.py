"""`python -m tests.fuzz`: tries inputs for some time, prints a table of what became of them, and fails on findings."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.finding import CORPUS, load_finding
from tests.fuzz.harness import memory_directory, run_count, run_seconds
from tests.fuzz.registry import TARGETS
from tests.fuzz.target import Target
from tests.fuzz.worker import Tally
from tests.long_runs import add_time, parser_of, print_table, write_record


def main() -> int:
    options = _options()
    torch.set_num_threads(1)
    with memory_directory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if options.repeat:
            return _repeat(options.repeat, directory)
        targets = [_prepared(name, directory) for name in options.targets]
        began, done = time.monotonic(), {target.name: Tally() for target in targets}

        def report(target: Target, total: Tally, part: Tally) -> None:
            for finding in part.findings.values():
                path = finding.save(options.corpus)
                if done[target.name].findings.setdefault(finding.key, finding) is finding:
                    print(f"FINDING {path}\n  {finding}", flush=True)
            passed = time.monotonic() - began
            print(f"{passed:5.0f} s  {target.name:20}  {total.inputs:9,} inputs", flush=True)

        totals = run_seconds(targets, directory, options.seconds, options.jobs, options.seed, report)
    rows = _rows(totals)
    print_table(rows)
    write_record(options.record, options, rows, sanitized=sanitized())
    return int(any(tally.broken for tally in totals.values()))


def _options() -> argparse.Namespace:
    parser = parser_of("fuzz", __doc__, "targets", TARGETS)
    add_time(parser)
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="where findings are kept")
    parser.add_argument("--repeat", type=Path, help="a finding to try again")
    return parser.parse_args()


def _prepared(name: str, directory: Path) -> Target:
    target = TARGETS[name]()
    target.prepare(directory / "corpus" / name)
    return target


def _repeat(path: Path, directory: Path) -> int:
    finding = load_finding(path)
    target = _prepared(finding.target, directory)
    target.mutate = lambda rng: finding.given  # type: ignore[method-assign]
    tally = run_count(target, directory / "repeat", range(1), finding.seed)
    for again in tally.findings.values():
        print(again)
    print("findings: ", tally.broken)
    return int(tally.broken > 0)


def _rows(totals: dict[str, Tally]) -> list[dict[str, Any]]:
    return [
        {
            "target": name,
            "inputs": tally.inputs,
            "accepted": tally.accepted,
            "refused": tally.refused,
            "findings": tally.broken,
            "peak_bytes": tally.peak_bytes,
        }
        for name, tally in totals.items()
    ]


def sanitized() -> bool:
    """Return whether AddressSanitizer watches over this process, and what is compiled for it."""
    maps = Path("/proc/self/maps")
    return maps.exists() and "libasan" in maps.read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
