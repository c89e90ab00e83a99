"""Measures small checkpoints on two real runs that it trains itself: ratio, fidelity, speed, stall and memory.

Run `python -m benchmarks.checkpoints`; it needs the `test` and `bench` extras and no network. It writes
`benchmarks/results/checkpoints.json`, and draws its curves into `docs/`. The full protocol has three seeds and takes
about half an hour on two cores; `--quick` has one, takes minutes and prints its results without writing them there.
`--only PART` measures one part again and leaves the others as they are; several processes may measure different
parts at once. Timings want an idle machine.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import re
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import protocol, runs

RESULTS = Path(__file__).parent.parent / "results" / "checkpoints.json"
# Runs of an earlier call are used again.
WORK = Path(tempfile.gettempdir()) / "trainweights-checkpoints"
SEEDS = (0, 1, 2)
QUICK_SEEDS = SEEDS[:1]

Part = Callable[[tuple[int, ...]], dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed; results are printed only")
    parser.add_argument("--only", choices=PARTS, help="the part to measure; the others keep their results")
    arguments = parser.parse_args()
    results = WORK / "quick.json" if arguments.quick else RESULTS
    WORK.mkdir(exist_ok=True)
    for part in [arguments.only] if arguments.only else PARTS:
        PARTS[part](QUICK_SEEDS if arguments.quick else SEEDS, results)
    print(results.read_text(encoding="utf-8"))


def measure_run(part: str, seeds: tuple[int, ...], results: Path) -> None:
    for seed in seeds:
        found = protocol.measure(part, seed, WORK)
        write(results, part, {"title": runs.RUNS[part].title, "seeds": {str(seed): found}})
        protocol.discard(part, seed, WORK, keep=protocol.Experiment(part, seed, WORK).steps[:2] if seed == 0 else ())


def write(path: Path, part: str, found: dict[str, Any]) -> None:
    """Merge a part into the results; other processes may be doing the same."""
    with (WORK / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        report["versions"] = {name: version(name) for name in ("torch", "transformers", "zstandard")}
        if "seeds" in found:
            found["seeds"] = {**report.get(part, {}).get("seeds", {}), **found["seeds"]}
        report[part] = found
        text = json.dumps(report, indent=2, sort_keys=True)
        # A list of numbers stays on one line.
        text = re.sub(r"\[[-\d.e,\s]+\]", lambda match: re.sub(r"\s+", " ", match[0]), text)
        path.write_text(text + "\n", encoding="utf-8")


PARTS: dict[str, Any] = {
    "lm": lambda seeds, results: measure_run("lm", seeds, results),
    "ft": lambda seeds, results: measure_run("ft", seeds, results),
}

if __name__ == "__main__":
    main()
