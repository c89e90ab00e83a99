"""Draws `docs/speed.svg` from the newest result of `benchmarks.run`; needs the `bench` extra."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.speed.tables import newest

_COLORS = {"bf16": "#8a8a8a", "int8": "#1f77b4", "int4": "#1f77b4", "float8_e4m3": "#1f77b4"}
DRAWING = Path(__file__).parent.parent.parent / "docs" / "speed.svg"


def draw(report: dict[str, Any], out: Path) -> None:
    """Draw decoding and prefill beside each other, one bar a method, the range of the rounds as a line.

    Args:
        report: What `benchmarks.run` wrote.
        out: The SVG file to write.
    """
    # A salt and no date: the same figures give the same bytes.
    matplotlib.rcParams["svg.hashsalt"] = "speed"
    figure = Figure(figsize=(9, 4))
    axes = figure.subplots(1, 2, sharey=True)
    for axis, phase in zip(axes, ("decode", "prefill"), strict=True):
        rows = [row for row in report["llama"] if (row["phase"], row["threads"]) == (phase, 1)]
        rows = [row for row in rows if "fp32" not in row["name"]][::-1]
        ratios = [row["ratio"] for row in rows]
        low = [max(row["ratio"] - row["ratio_range"][0], 0) for row in rows]
        high = [max(row["ratio_range"][1] - row["ratio"], 0) for row in rows]
        colors = [_COLORS.get(row["name"].split(",")[0].split()[0], "#d0d0d0") for row in rows]
        axis.barh([row["name"] for row in rows], ratios, xerr=[low, high], color=colors, ecolor="#555555", height=0.7)
        axis.axvline(1, color="#555555", linewidth=0.8)
        axis.set_title(f"{phase}, times the speed of bf16")
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    draw(json.loads(newest().read_text(encoding="utf-8")), DRAWING)
