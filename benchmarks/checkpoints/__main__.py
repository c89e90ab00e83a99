"""Measures small checkpoints on two real runs that it trains itself: ratio, fidelity, speed, memory and stall.

Run `python -m benchmarks.checkpoints`; it needs the `test` and `bench` extras and no network. It writes
`benchmarks/results/checkpoints.json`, draws `docs/checkpoint_curves.svg` and says which targets are met. The full
protocol has three seeds and takes hours of one core, most of them in training; `--quick` has one and leaves the
committed files alone. `--only PART` measures one part again; the others keep their results, and several processes may
measure different parts at once. Where a run was interrupted, the same command goes on, as long as no code of
checkpoints has changed. Timings want OMP_NUM_THREADS=1 and an idle machine.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoints.curves import draw
from benchmarks.checkpoints.protocol import Experiment, Piece, discard, measure, measure_with_base
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

# Findings, each with the keys that lead to it.
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
            merge(results, keys, found)
        measured = (part, "base") if part == "ft" else (part,)
        for target in judge({key: read(results)[key] for key in measured}):
            print(target)


def measure_run(name: str, seeds: Sequence[int]) -> Found:
    """Yield the findings of a run, for the fine-tune also with its base. Those of an earlier call are taken again."""
    torch.set_num_threads(1)
    path = WORK / f"{name}-{_digest()}.json"
    known: dict[str, Any] = read(path) if path.exists() else {}
    yield (name, "title"), RUNS[name].title
    for seed in seeds:
        experiment = Experiment(name, seed, WORK)
        for keys, find in _pieces(experiment):
            key = "/".join(keys)
            if key not in known:
                experiment.require(experiment.steps)
                known[key] = find()
                path.write_text(json.dumps(known), encoding="utf-8")
            yield keys, known[key]
        discard(experiment)


def _pieces(experiment: Experiment) -> Iterator[Piece]:
    for keys, find in measure(experiment):
        yield (experiment.name, "seeds", str(experiment.seed), *keys), find
    if experiment.name == "ft":
        for keys, find in measure_with_base(experiment):
            yield ("base", "seeds", str(experiment.seed), *keys), find


def _digest() -> str:
    """Return a digest of the code that is measured: what another one found does not count."""
    files = sorted((ROOT / "hf_trainweights" / "checkpoint").rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _below(part: str, found: Found) -> Found:
    yield from (((part, *keys), finding) for keys, finding in found)


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
    "ft": lambda seeds: measure_run("ft", seeds),
    "speeds": lambda _: _below("speeds", measure_speeds(WORK)),
    "memory": lambda _: _below("memory", measure_memory(WORK)),
    "stall": lambda _: _below("stall", measure_stall(WORK)),
}

if __name__ == "__main__":
    main()
