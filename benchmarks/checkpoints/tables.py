"""The tables about checkpoints, which `benchmarks/tables.py` puts into docs/checkpoint.md and docs/measured."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean
from typing import Any

from benchmarks.checkpoints.targets import (
    BF16,
    RUN_NAMES,
    RUN_SAVES,
    SHORT_RUN_SAVES,
    ratio,
    ratios,
    run_ratio,
    seeds_with_sizes,
)

# Header, rows, and what stands below.
CheckpointTable = tuple[list[str], list[list[str]], str]

_MODES = ("lossless", "near-lossless", "compact")
_OTHERS = ("torch.save", "zstd -3", "ZipNN")
_SPEED_ROWS = (*_OTHERS, "int8 groups", "lossless, no anchor", *_MODES)
_FIDELITY_ROWS = (
    ("1 ulp", "first", "weights off by 1 ulp"),
    ("near-lossless", "alone", "near-lossless, no anchor"),
    ("near-lossless", "first", "near-lossless, first delta"),
    ("near-lossless", "late", "near-lossless, late delta"),
    ("near-lossless", "chain", "near-lossless, fifth resume"),
    ("compact", "alone", "compact, no anchor"),
    ("compact", "first", "compact, first delta"),
    ("compact", "late", "compact, late delta"),
    ("compact", "chain", "compact, fifth resume"),
    ("int8 groups", "first", "int8 groups, no anchor"),
    ("1 ulp", "early", "weights off by 1 ulp, early"),
    ("near-lossless", "early", "near-lossless, early"),
    ("compact", "early", "compact, early"),
    ("1 ulp", "first save", "weights off by 1 ulp, first save"),
    ("near-lossless", "first save", "near-lossless, first save"),
    ("compact", "first save", "compact, first save"),
)


def checkpoint_sizes(report: dict[str, Any]) -> CheckpointTable:
    """Return how many times smaller checkpoints become, beside what others reach."""
    rows = []
    for name in _OTHERS:
        rows.append(
            [name, *(cell for run in RUN_NAMES for cell in (f"{report['speeds'][run][name]['ratio']:.2f}", "", "", ""))]
        )
    for name, key in (("int8 groups", "int8_groups"), ("lossless, no anchor", "lossless_alone")):
        found = [over_seeds(report, run, lambda seed, key=key: ratio(seed[key])) for run in RUN_NAMES]
        rows.append([name, *(cell for value in found for cell in (f"{value:.2f}", "", "", ""))])
    for mode in _MODES:
        rows.append([mode, *(f"{value:.2f}" for run in RUN_NAMES for value in mode_ratios(report, run, mode))])
    with_base, base_seeds = base_ratios(report)
    for mode, values in with_base.items():
        rows.append([f"{mode}, with the base", "", "", "", "", *(f"{value:.2f}" for value in values)])
    points = ("first delta", "last delta", "three saves", "whole run")
    header = ["", *(f"{run}, {point}" for run in ("LM", "FT") for point in points)]
    bf16 = {key: over_seeds(report, "lm", lambda seed, key=key: ratio(seed["bf16"][key])) for key in BF16}
    of_base = (
        "With the base, MiniLM-L6-v2 itself, the first delta is the first save and the last delta the sixth "
        f"({base_seeds} seed{'s' if base_seeds > 1 else ''}). "
    )
    caption = (
        f"Bytes of weights and optimizer as a Trainer writes them, divided by bytes on disk; {seeds_of(report)}. LM: "
        f"{report['lm']['title']}, a save every 50 steps; FT: {report['ft']['title']}, every 20. The last delta is the "
        f"one before a new anchor; the whole run is {RUN_SAVES} saves, the anchor among them. "
        f"{of_base if with_base else ''}Int8 groups of 64 hold "
        "weights and first moments; the second moment is exact there, because linear formats are refused for it. LM in "
        f"pure bfloat16, lossless: {bf16['alone']:.2f} without an anchor, {bf16['with_anchor']:.2f} with one 20 steps "
        "older."
    )
    return header, rows, caption


def checkpoint_fidelity(report: dict[str, Any]) -> CheckpointTable:
    """Return how far resumed training strays from training that was not interrupted."""
    rows = []
    for run, label in zip(RUN_NAMES, ("LM", "FT"), strict=True):
        exact = all(seed["exact"] for seed in seeds_with_sizes(report, run) if "exact" in seed)
        exact_count = sum("exact" in seed for seed in seeds_with_sizes(report, run))
        rows.append([f"{label}, lossless", *(["0"] * 5 if exact else ["not exact"] * 5), str(exact_count)])
        for mode, point, text in _FIDELITY_ROWS:
            found = fidelity(report, run, mode, point)
            if not found:
                continue
            after = [row["held_out_after"] for row in found if "held_out_after" in row]
            cells = [
                f"{mean(row['mean_absolute_difference'] for row in found):.4f}",
                f"{max(row['max_absolute_difference'] for row in found):.4f}",
                f"{mean(row['bias'] for row in found):+.4f}",
                f"{mean(row['held_out_at_restore'] for row in found):+.4f}",
                f"{mean(after):+.4f}" if after else "",
                str(len(found)),
            ]
            rows.append([f"{label}, {text}", *cells])
    ages = [anchor_age_steps(report, run) for run in RUN_NAMES]
    header = ["resumed from", "mean", "largest", "bias", "held out, at restore", "held out, after 100 steps", "seeds"]
    caption = (
        "Differences of losses, in nats, to the run that was not interrupted, over the 100 steps after resuming in a "
        "new process; the mean of some seeds, the largest over all of them. LM resumes at step 200 of 300, FT at 120 "
        f"of 220. Behind a late delta is a full save that is {ages[0]} and {ages[1]} steps older. Five resumes follow "
        "each other 10 steps apart, each from what the one before saved; the fifth is measured for 20 steps. The rows "
        "off by 1 ulp are the floor: no lossy codec can do better. Early is the run's first delta, near the highest "
        "learning rate."
    )
    return header, rows, caption


def checkpoint_speeds(report: dict[str, Any]) -> CheckpointTable:
    """Return how fast checkpoints are made small and read."""
    speeds = report["speeds"]
    rows = [
        [
            name,
            *(
                f"{speeds[run][name][f'{verb}_gb_per_second']:.2f}"
                for run in RUN_NAMES
                for verb in ("encode", "decode")
            ),
        ]
        for name in _SPEED_ROWS
    ]
    header = ["GB/s on one core", "LM, encode", "LM, decode", "FT, encode", "FT, decode"]
    standstill = [
        f"{modes[mode]['seconds'] / modes['plain']['seconds']:.2f}x for {mode} where {kind}"
        for kind, modes in report["stall"].items()
        for mode in modes
        if mode != "plain"
    ]
    peaks = [
        f"{max(memory['peak_bytes'].values()) / 1e6:.0f} MB of memory for {label}, whose largest tensor has "
        f"{memory['largest_tensor_bytes'] / 1e6:.0f} MB"
        for label, memory in zip(("LM", "FT"), (report["memory"][run] for run in RUN_NAMES), strict=True)
    ]
    caption = (
        "Plain bytes divided by CPU time at the first delta. Encoding goes from tensors to files and includes digests; "
        "decoding checks the checksums. zstd and ZipNN work in memory and check nothing; SHA-256 alone reaches "
        f"{speeds['sha256_gb_per_second']:.2f} GB/s on this machine. How long a save stops the training, "
        f"relative to a plain Trainer: {'; '.join(standstill)}. Making a checkpoint small takes at most "
        f"{', and '.join(peaks)}."
    )
    return header, rows, caption


def checkpoints(report: dict[str, Any]) -> CheckpointTable:
    """Return what a reader of README wants to know of the modes."""
    rows = []
    for mode in _MODES:
        cells = [f"{mode_ratios(report, run, mode)[place]:.1f}x" for run in RUN_NAMES for place in (0, 3)]
        for run in RUN_NAMES:
            found = [] if mode == "lossless" else fidelity(report, run, mode, "first")
            unknown = "0" if mode == "lossless" else ""
            cells.append(f"{mean(row['mean_absolute_difference'] for row in found):.4f}" if found else unknown)
        rows.append([mode, *cells])
    header = [
        "mode",
        "LM, one save",
        "LM, run",
        "FT, one save",
        "FT, run",
        "LM, loss differs by",
        "FT, loss differs by",
    ]
    lm, ft = (len(fidelity(report, run, "near-lossless", "first")) for run in RUN_NAMES)
    fewer = "" if lm == ft == len(report["lm"]["seeds"]) else f", of the losses {lm} for LM and {ft} for FT"
    caption = (
        "Bytes of weights and optimizer as a Trainer writes them divided by ours, and the mean difference of the loss "
        f"over the 100 steps after a resume; {seeds_of(report)}{fewer}. LM: "
        f"{report['lm']['title']}. FT: {report['ft']['title']}."
    )
    return header, rows, caption


def mode_ratios(report: dict[str, Any], run: str, mode: str) -> list[float]:
    """Return the mode's ratio at the first delta, the last one, over three saves and over the run."""
    found = [_all_ratios(seed["checkpoints"][mode]) for seed in seeds_with_sizes(report, run)]
    return [mean(values) for values in zip(*found, strict=True)]


def _all_ratios(rows: list[dict[str, Any]]) -> tuple[float, float, float, float]:
    first, last, whole = ratios(rows)
    return first, last, run_ratio(rows, SHORT_RUN_SAVES), whole


def base_ratios(report: dict[str, Any]) -> tuple[dict[str, list[float]], int]:
    """Return by mode the ratio at the first save, the last, over three and a run with the base; and how many seeds."""
    seeds = [seed["checkpoints"] for seed in report.get("base", {}).get("seeds", {}).values()]
    seeds = [seed for seed in seeds if seed.keys() >= set(_MODES)]
    found = {}
    for mode in _MODES if seeds else ():
        runs = [[ratio(seed[mode][0]), *_all_ratios(seed[mode])[1:]] for seed in seeds]
        found[mode] = [mean(values) for values in zip(*runs, strict=True)]
    return found, len(seeds)


def fidelity(report: dict[str, Any], run: str, mode: str, point: str) -> list[dict[str, Any]]:
    """Return a row of each seed."""
    found = (seed.get("fidelity", {}).get(mode, {}).get(point) for seed in seeds_with_sizes(report, run))
    return [row for row in found if row]


def anchor_age_steps(report: dict[str, Any], run: str) -> int:
    """Return how much older the anchor of the late delta is; the same for every seed and mode, or it raises."""
    ages = set()
    for seed in seeds_with_sizes(report, run):
        for mode in seed.get("fidelity", {}).keys() & set(_MODES[1:]):
            step = seed["fidelity"][mode].get("late", {}).get("step")
            if step is None:
                continue
            rows = [row for row in seed["checkpoints"][mode] if row["step"] <= step and row["is_anchor"]]
            ages.add(step - rows[-1]["step"])
    (age,) = ages
    return age


def over_seeds(report: dict[str, Any], run: str, value: Callable[[dict[str, Any]], float]) -> float:
    """Return the mean of something over a run's seeds."""
    return mean(value(seed) for seed in seeds_with_sizes(report, run))


def seeds_of(report: dict[str, Any]) -> str:
    """Return how many seeds stand behind a figure."""
    count = min(len(seeds_with_sizes(report, run)) for run in RUN_NAMES)
    return f"mean of {count} seeds" if count > 1 else "one seed"


CHECKPOINT_TABLES: dict[str, Callable[[dict[str, Any]], CheckpointTable]] = {
    "checkpoints": checkpoints,
    "checkpoint-sizes": checkpoint_sizes,
    "checkpoint-fidelity": checkpoint_fidelity,
    "checkpoint-speeds": checkpoint_speeds,
}
