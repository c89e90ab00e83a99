"""Draws `docs/speed.svg` from the newest result of `benchmarks.run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.speed.tables import newest
from hf_trainweights.report.charts import Bar, bar_chart
from hf_trainweights.report.drawing import Drawing, stack

DRAWING = Path(__file__).parent.parent.parent / "docs" / "speed.svg"

_LEGEND = ("hf_trainweights", "other packages", "", "the float model")
_OURS, _OTHERS, _FLOAT = 0, 1, 3


def draw(report: dict[str, Any], out: Path) -> None:
    """Draw decoding and prefill below each other, one bar a method, the range of the rounds as a line.

    Args:
        report: What `benchmarks.run` wrote.
        out: The SVG file to write.
    """
    panels = [_panel(report, phase, prompt) for phase, prompt in (("decode", "one token"), ("prefill", "256 tokens"))]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    caption = (
        f"A Llama of 415M random weights on {report['machine']}, one thread, {report['date']}. "
        f"Thin lines: the range of the rounds. {versions}."
    )
    drawing = stack("Speed of decoding and prefill", [[panel] for panel in panels], caption)
    out.write_text(drawing.standalone(), encoding="utf-8")


def _panel(report: dict[str, Any], phase: str, prompt: str) -> Drawing:
    rows = [row for row in report["llama"] if (row["phase"], row["threads"]) == (phase, 1)]
    bars = [
        Bar(
            row["name"],
            tuple(row["ratio"] if color == _series(row["name"]) else 0.0 for color in range(len(_LEGEND))),
            f"{row['ratio']:.2f}x",
            tuple(row["ratio_range"]),
        )
        for row in rows
        if "fp32" not in row["name"]
    ]
    title = f"{phase.capitalize()}, {prompt} a call"
    return bar_chart(title, bars, "times the speed of the bfloat16 model", _LEGEND, reference=1)


def _series(name: str) -> int:
    if name == "bf16":
        return _FLOAT
    return _OTHERS if name.startswith(("torchao", "bitsandbytes", "quanto")) else _OURS


if __name__ == "__main__":
    draw(newest(), DRAWING)
