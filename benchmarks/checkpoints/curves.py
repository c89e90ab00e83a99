"""Draws the curves: how small each save of a run becomes, and how far resumed training strays."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

from hf_trainweights.report.charts import Curve, line_chart
from hf_trainweights.report.drawing import Drawing, stack

# The series' colors: of both panels, so that a mode looks the same in each.
COLORS = {"lossless": 0, "near-lossless": 2, "compact": 1, "int8 groups": 3, "1 ulp": 4}
LABELS = {"1 ulp": "off by 1 ulp", "int8 groups": "int8 in groups of 64"}
_WIDTH = 460


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw the first seed of each run.

    Args:
        report: The results.
        path: The SVG file; equal results give equal bytes.
    """
    results = [(report[run]["title"], report[run]["seeds"]["0"]) for run in ("lm", "ft")]
    versions = report["versions"]
    caption = (
        "The first seed of each run, AdamW in float32; a save is weights and both moments of the optimizer. Resumed "
        "from the first save that is stored against an anchor. Off by 1 ulp: the same run resumed from weights each of "
        "which is the next float32 number, the smallest error there is; no lossy mode can avoid what training makes of "
        "that. "
        f"{_lossless(results)} torch {versions['torch']}, transformers {versions['transformers']}, zstandard "
        f"{versions['zstandard']}."
    )
    rows = [[_ratios(*each) for each in results], [_differences(*each) for each in results]]
    title = "Ratio of each save of a run, and difference of the loss after resuming"
    path.write_text(stack(title, rows, caption).standalone(), encoding="utf-8")


def _lossless(results: list[tuple[str, dict[str, Any]]]) -> str:
    """Return where lossless is in the lower panels: a logarithmic axis has no 0."""
    if all(result["exact"] for _, result in results):
        return "Lossless is not in the lower panels: its losses are the same bits."
    return "The losses of lossless differed."


def _ratios(title: str, result: dict[str, Any]) -> Drawing:
    curves = [
        Curve(mode, tuple((row["step"], row["plain_bytes"] / row["stored_bytes"]) for row in rows), COLORS[mode])
        for mode, rows in result["checkpoints"].items()
    ]
    return line_chart(
        title, curves, "step of the checkpoint", "times smaller: plain bytes / stored bytes", width=_WIDTH, log=True
    )


def _differences(title: str, result: dict[str, Any]) -> Drawing:
    """Draw the mean absolute difference up to each step, which single steps scatter around."""
    curves = []
    for mode, points in result["fidelity"].items():
        sums = accumulate(map(abs, points["first"]["differences"]))
        means = tuple((count, total / count) for count, total in enumerate(sums, start=1))
        curves.append(Curve(LABELS.get(mode, mode), means, COLORS[mode], dashed=mode == "1 ulp"))
    short = title.partition(",")[0]
    return line_chart(
        f"{short}: loss after resuming",
        curves,
        "steps after resuming",
        "mean |difference of the loss| to the run that went on, nats",
        width=_WIDTH,
        log=True,
    )
