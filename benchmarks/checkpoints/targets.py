"""The floors that small checkpoints are to reach, and what was measured beside each."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# So many saves, the anchor among them, are a run.
RUN_SAVES = 6
# So many are its first saves.
SHORT_RUN_SAVES = 3
RUN_NAMES = ("lm", "ft")
MEMORY_FACTOR = 4
MEMORY_BYTES = 256_000_000

# By mode: the ratio at the first delta, the last delta and over the run, each for the LM and the fine-tune.
RATIOS = {
    "lossless": ((1.23, 2.65), None, (1.22, 2.45)),
    "near-lossless": ((12, 16), (11, 13), (12.5, 13.5)),
    "compact": ((22, 25), (18.5, 18), (18, 17)),
}
SHORT_RATIOS = {"lossless": 1.22, "near-lossless": 9, "compact": 12}
# Over the run, where the fine-tune's checkpoints are stored against its base.
BASE_RATIOS = {"lossless": 2.65, "near-lossless": 17, "compact": 23}
LOSSLESS_ALONE = (1.19, 1.7)
BF16 = {"alone": 1.48, "with_anchor": 1.8}
# By mode: mean absolute difference of losses, absolute bias, held-out loss at the restore.
FIDELITY = {"near-lossless": (0.002, None, 0.001), "compact": (0.008, 0.004, 0.01)}
# By row: GB/s of encoding and of decoding.
SPEEDS = {
    "lossless, no anchor": (0.65, 0.9),
    "lossless": (0.6, 0.8),
    "near-lossless": (0.6, 1.2),
    "compact": (0.6, 1.2),
}
STALLS = {"file names are module names": 1.1, "file names differ": 1.6}


@dataclass(frozen=True)
class Target:
    """One floor or ceiling.

    Args:
        name: What it is about.
        limit: What was promised.
        measured: What was found, the mean over the seeds.
        is_floor: Whether more is better.
    """

    name: str
    limit: float
    measured: float
    is_floor: bool = True

    @property
    def is_met(self) -> bool:
        """Whether the promise is kept."""
        return self.measured >= self.limit if self.is_floor else self.measured <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.is_floor else "<="
        return f"{'met   ' if self.is_met else 'MISSED'} {self.name}: {self.measured:.4g} ({sign} {self.limit:g})"


def judge(report: dict[str, Any]) -> Iterator[Target]:
    """Yield every target whose part has been measured.

    Args:
        report: The results.

    Yields:
        The targets.
    """
    for place, run in enumerate(RUN_NAMES):
        seeds = seeds_with_sizes(report, run)
        if seeds:
            yield from _judge_ratios(run, place, seeds)
            yield from _judge_fidelity(run, seeds)
        if run in report.get("speeds", {}):
            for row, (encode, decode) in SPEEDS.items():
                found = report["speeds"][run][row]
                yield Target(f"{run} {row} encode GB/s", encode, found["encode_gb_per_second"])
                yield Target(f"{run} {row} decode GB/s", decode, found["decode_gb_per_second"])
        if run in report.get("memory", {}):
            found = report["memory"][run]
            limit = MEMORY_FACTOR * found["largest_tensor_bytes"] + MEMORY_BYTES
            for row, peak in found["peak_bytes"].items():
                yield Target(f"{run} {row} memory MB", limit / 1e6, peak / 1e6, is_floor=False)
    for mode, limit in BASE_RATIOS.items():
        seeds = [seed["checkpoints"] for seed in report.get("base", {}).get("seeds", {}).values()]
        runs = [ratios(seed[mode])[2] for seed in seeds if mode in seed]
        if runs:
            yield Target(f"ft {mode} with the base, run", limit, statistics.mean(runs))
    for kind, limit in STALLS.items():
        modes = report.get("stall", {}).get(kind, {})
        for mode in modes.keys() - {"plain"}:
            ratio = modes[mode]["seconds"] / modes["plain"]["seconds"]
            yield Target(f"{kind}: standstill of {mode} to plain", limit, ratio, is_floor=False)


def seeds_with_sizes(report: dict[str, Any], run: str) -> list[dict[str, Any]]:
    """Return the results of each seed whose sizes are there; fidelity, which takes hours, may still be under way."""
    seeds = report.get(run, {}).get("seeds", {})
    return [seeds[name] for name in sorted(seeds) if "int8_groups" in seeds[name]]


def ratios(rows: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Return the ratio at the first delta, at the last one before a new anchor, and over the run with its anchor."""
    anchors = [place for place, row in enumerate(rows) if row["is_anchor"]]
    last = (anchors[1] if len(anchors) > 1 else len(rows)) - 1
    return ratio(rows[1]), ratio(rows[last]), run_ratio(rows, RUN_SAVES)


def run_ratio(rows: list[dict[str, Any]], saves: int) -> float:
    """Return how many times smaller the first saves of a run became together."""
    run = rows[:saves]
    return sum(row["plain_bytes"] for row in run) / sum(row["stored_bytes"] for row in run)


def ratio(row: dict[str, Any]) -> float:
    """Return how many times smaller a checkpoint became."""
    return row["plain_bytes"] / row["stored_bytes"]


def _judge_ratios(run: str, place: int, seeds: list[dict[str, Any]]) -> Iterator[Target]:
    alone = statistics.mean(ratio(seed["lossless_alone"]) for seed in seeds)
    yield Target(f"{run} lossless, no anchor", LOSSLESS_ALONE[place], alone)
    for mode, limits in RATIOS.items():
        found = zip(*(ratios(seed["checkpoints"][mode]) for seed in seeds), strict=True)
        for point, limit, values in zip(("first delta", "last delta", "run"), limits, found, strict=True):
            if limit:
                yield Target(f"{run} {mode} {point}", limit[place], statistics.mean(values))
        short = [run_ratio(seed["checkpoints"][mode], SHORT_RUN_SAVES) for seed in seeds]
        yield Target(f"{run} {mode} run of {SHORT_RUN_SAVES}", SHORT_RATIOS[mode], statistics.mean(short))
    for point, limit in BF16.items():
        values = [ratio(seed["bf16"][point]) for seed in seeds if "bf16" in seed]
        if values:
            yield Target(f"{run} bf16 lossless {point.replace('_', ' ')}", limit, statistics.mean(values))


def _judge_fidelity(run: str, seeds: list[dict[str, Any]]) -> Iterator[Target]:
    exact = [seed["exact"] for seed in seeds if "exact" in seed]
    if exact:
        yield Target(f"{run} lossless resumes bit for bit", 1, float(all(exact)))
    for mode, (mean, bias, held_out) in FIDELITY.items():
        for point in ("alone", "first", "late", "chain"):
            found = (seed.get("fidelity", {}).get(mode, {}).get(point) for seed in seeds)
            rows = [row for row in found if row]
            if not rows:
                continue
            name = f"{run} {mode} {point}"
            yield _ceiling(f"{name} mean difference", mean, [row["mean_absolute_difference"] for row in rows])
            if bias:
                yield _ceiling(f"{name} bias", bias, [abs(row["bias"]) for row in rows])
            held_out_losses = [abs(row["held_out_at_restore"]) for row in rows]
            yield _ceiling(f"{name} held-out at restore", held_out, held_out_losses)


def _ceiling(name: str, limit: float, values: list[float]) -> Target:
    return Target(name, limit, statistics.mean(values), is_floor=False)
