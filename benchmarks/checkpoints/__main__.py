"""Measures small checkpoints on two real runs that it trains itself: ratio, fidelity, speed, memory and stall.

Run `python -m benchmarks.checkpoints`; it needs the `test` and `bench` extras and no network. It writes
`benchmarks/results/checkpoints.json`, draws `docs/checkpoint_curves.svg` and says which targets are met. The full
protocol has three seeds and takes about half an hour on two cores; `--quick` has one, takes minutes and leaves the
committed files alone. `--only PART` measures one part again; the others keep their results, and several processes may
measure different parts at once. Timings want OMP_NUM_THREADS=1 and an idle machine.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.checkpoints.curves import draw
from benchmarks.checkpoints.protocol import Experiment, discard, measure, measure_with_base
from benchmarks.checkpoints.runs import RUNS
from benchmarks.checkpoints.speeds import measure_memory, measure_speeds
from benchmarks.checkpoints.stall import measure_stall
from benchmarks.checkpoints.targets import judge

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "checkpoints.json"
CURVES = ROOT / "docs" / "checkpoint_curves.svg"
# Runs of an earlier call are used again.
WORK = Path(tempfile.gettempdir()) / "trainweights-checkpoints"
SEEDS = (0, 1, 2)
FULL = (RESULTS, SEEDS, CURVES)

# What a part finds, each piece with the keys that lead to it.
Found = Iterator[tuple[tuple[str, ...], Any]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed; the committed results stay")
    parser.add_argument("--only", choices=[*PARTS, "curves"], help="the part to measure; the others keep their results")
    arguments = parser.parse_args()
    WORK.mkdir(exist_ok=True)
    results, seeds, curves = (WORK / "quick.json", SEEDS[:1], WORK / "quick.svg") if arguments.quick else FULL
    for part in [arguments.only] if arguments.only else [*PARTS, "curves"]:
        if part == "curves":
            draw(read(results), curves)
            continue
        for keys, found in PARTS[part](seeds):
            merge(results, (part, *keys), found)
        for target in judge({part: read(results)[part]}):
            print(target)


def measure_run(name: str, seeds: Sequence[int]) -> Found:
    yield ("title",), RUNS[name].title
    for seed in seeds:
        experiment = Experiment(name, seed, WORK)
        for keys, found in measure(experiment):
            yield ("seeds", str(seed), *keys), found
        discard(experiment)


def measure_base(seeds: Sequence[int]) -> Found:
    for seed in seeds:
        for keys, found in measure_with_base(Experiment("ft", seed, WORK)):
            yield ("seeds", str(seed), *keys), found


def merge(path: Path, keys: Sequence[str], found: Any) -> None:
    """Put one finding in its place among the results; other processes may be doing the same."""
    with (WORK / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        report = read(path) if path.exists() else {}
        report["versions"] = {name: version(name) for name in ("torch", "transformers", "zstandard")}
        place = report
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = found
        text = json.dumps(report, indent=2, sort_keys=True)
        # A list of numbers stays on one line.
        text = re.sub(r"\[[-\d.e,\s]+\]", lambda match: " ".join(match[0].split()), text)
        path.write_text(text + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """Return the results so far."""
    return json.loads(path.read_text(encoding="utf-8"))


PARTS: dict[str, Callable[[Sequence[int]], Found]] = {
    "lm": lambda seeds: measure_run("lm", seeds),
    # Before `ft`, which removes the run when it is done.
    "base": measure_base,
    "ft": lambda seeds: measure_run("ft", seeds),
    "speeds": lambda _: measure_speeds(WORK),
    "memory": lambda _: measure_memory(WORK),
    "stall": lambda _: measure_stall(WORK),
}

if __name__ == "__main__":
    main()
