"""What a second thread gains where training waits for a save or a load, by the clock: it wants two idle cores."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoints.protocol import MODES, Experiment
from benchmarks.checkpoints.runs import RUNS
from benchmarks.checkpoints.speeds import ROWS, Save

REPEATS = 7
THREADS = (1, 2)


def measure_threads(root: Path) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the median seconds to encode and decode the first delta by number of threads, by run and mode."""
    for name in RUNS:
        experiment = Experiment(name, 0, root)
        experiment.require(experiment.steps[:2])
        yield (name,), {mode: _measure(experiment, mode) for mode in MODES}
    torch.set_num_threads(1)


def _measure(experiment: Experiment, mode: str) -> dict[str, dict[str, dict[str, float]]]:
    """Measure one and two threads in turn, so that both meet the same moods of the machine."""
    save = Save.prepare(experiment, *ROWS[mode])
    seconds: dict[str, dict[str, list[float]]] = {
        verb: {str(threads): [] for threads in THREADS} for verb in ("encode", "decode")
    }
    for _ in range(REPEATS):
        for threads in THREADS:
            torch.set_num_threads(threads)
            for verb, work in (("encode", save.encode), ("decode", save.decode)):
                start = time.perf_counter()
                work()
                seconds[verb][str(threads)].append(time.perf_counter() - start)
    shutil.rmtree(save.path.parent)
    return {
        verb: {"seconds": {threads: round(statistics.median(each), 4) for threads, each in by_threads.items()}}
        for verb, by_threads in seconds.items()
    }
