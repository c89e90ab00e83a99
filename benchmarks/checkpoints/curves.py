"""Draws the curves: how small each save of a run becomes, and how far resumed training strays."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

COLORS = {
    "lossless": "#4c72b0",
    "near-lossless": "#55a868",
    "compact": "#c44e52",
    "int8 groups": "#8c8c8c",
    "1 ulp": "#000000",
}


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw the first seed of each run.

    Args:
        report: The results.
        path: The SVG file; equal results give equal bytes.
    """
    # Without a salt the identifiers in the file are random.
    with mpl.rc_context({"svg.hashsalt": "checkpoints", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(8, 5.6), layout="constrained")
        for column, run in enumerate(("lm", "ft")):
            result = report[run]["seeds"]["0"]
            _draw_ratios(figure.add_subplot(2, 2, column + 1, title=report[run]["title"]), result)
            _draw_differences(figure.add_subplot(2, 2, column + 3), result)
        figure.savefig(path, metadata={"Date": None})


def _draw_ratios(axes: Axes, result: dict[str, Any]) -> None:
    for mode, rows in result["checkpoints"].items():
        ratios = [row["plain_bytes"] / row["stored_bytes"] for row in rows]
        axes.plot([row["step"] for row in rows], ratios, "o-", markersize=3, color=COLORS[mode], label=mode)
    axes.set(xlabel="step of the checkpoint", ylabel="plain bytes / stored bytes", yscale="log")
    axes.set_yticks([1, 2, 5, 10, 20, 30], labels=["1", "2", "5", "10", "20", "30"])
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, alpha=0.3)
    axes.legend(frameon=False)


def _draw_differences(axes: Axes, result: dict[str, Any]) -> None:
    """Draw the mean absolute difference up to each step, which single steps scatter around."""
    for mode, points in result["fidelity"].items():
        sums = accumulate(map(abs, points["first"]["differences"]))
        means = [total / count for count, total in enumerate(sums, start=1)]
        axes.plot(range(1, len(means) + 1), means, color=COLORS[mode], label=mode)
    axes.set(xlabel="steps after resuming", ylabel="mean |loss difference| so far", yscale="log")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(frameon=False)
