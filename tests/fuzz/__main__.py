"""`python -m tests.fuzz`: tries inputs for some time, prints a table of what became of them, and fails on findings."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import commit, cpu_name, versions
from tests.fuzz.finding import CORPUS, load_finding
from tests.fuzz.harness import memory_directory, run_count, run_seconds
from tests.fuzz.registry import TARGETS
from tests.fuzz.target import Target
from tests.fuzz.worker import Tally


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
    _print_table(totals)
    if options.record:
        options.record.write_text(json.dumps(_record(options, totals), indent=2) + "\n", encoding="utf-8")
    return int(any(tally.broken for tally in totals.values()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="where findings are kept")
    parser.add_argument("--record", type=Path, help="JSON file for the table")
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


def _print_table(totals: dict[str, Tally]) -> None:
    print(f"{'target':20} {'inputs':>10} {'accepted':>10} {'refused':>10} {'findings':>9} {'peak MiB':>9}")
    for row in _rows(totals):
        counts = f"{row['inputs']:10,} {row['accepted']:10,} {row['refused']:10,} {row['findings']:9,}"
        print(f"{row['target']:20} {counts} {row['peak_bytes'] >> 20:9,}")
    print(f"{'together':20} {sum(tally.inputs for tally in totals.values()):10,}")


def _record(options: argparse.Namespace, totals: dict[str, Tally]) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "versions": versions()},
        "seconds": options.seconds,
        "seed": options.seed,
        "sanitized": sanitized(),
        "rows": _rows(totals),
    }


def sanitized() -> bool:
    """Return whether AddressSanitizer watches over this process, and what is compiled for it."""
    maps = Path("/proc/self/maps")
    return maps.exists() and "libasan" in maps.read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
