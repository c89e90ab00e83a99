"""Times several ways side by side: one after the other, round after round, so that all see the same noise."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Run = Callable[[], float]


def clock() -> float:
    """Return seconds: of this thread's CPU with one torch thread, which no neighbour can stretch; else of the wall."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def timed(function: Callable[[int], Any], repeats: int) -> Run:
    """Return a run that calls `function(0)`, `function(1)`, ... and returns the mean seconds of a call."""

    def run() -> float:
        start = clock()
        for index in range(repeats):
            function(index)
        return (clock() - start) / repeats

    return run


def timed_call(call: Callable[[], Any]) -> Run:
    """Return a run that calls a function once and returns the seconds on the wall; the first call warms up here."""

    def run() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    run()
    return run


def repeats_for(function: Callable[[int], Any], seconds: float, at_most: int) -> int:
    """Return how often to call a function so that it takes about so many seconds; calls it twice to warm up."""
    function(0)
    start = clock()
    function(1)
    return max(1, min(at_most, int(seconds / max(clock() - start, 1e-6))))


def interleave(runs: Mapping[str, Run], rounds: int, baseline: str) -> list[dict[str, Any]]:
    """Take every run once a round.

    Args:
        runs: Name to run.
        rounds: How often each is taken.
        baseline: The name whose seconds are divided by each run's, within a round.

    Returns:
        One row per run: the median of its seconds and of its speed-up over the baseline, and the latter's lowest and
        highest value.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(run())
    return [row(name, seconds[name], seconds[baseline]) for name in runs]


def row(name: str, seconds: list[float], baseline: list[float]) -> dict[str, Any]:
    """Return what `interleave` says of one run."""
    ratios = [reference / taken for reference, taken in zip(baseline, seconds, strict=True)]
    return {
        "name": name,
        "seconds": significant(statistics.median(seconds)),
        "ratio": significant(statistics.median(ratios)),
        "ratio_range": [significant(min(ratios)), significant(max(ratios))],
    }


def significant(value: float) -> float:
    """Return four significant digits."""
    return float(f"{value:.4g}")
