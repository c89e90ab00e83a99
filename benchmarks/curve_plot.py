"""Draws `docs/quality_curve.svg` from the result of `benchmarks.curve`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_trainweights.report.charts import Curve, line_chart
from hf_trainweights.report.drawing import stack

DRAWING = Path(__file__).parent.parent / "docs" / "quality_curve.svg"

# The families that are drawn, with their colors.
_FAMILIES = {
    "coded": 3,
    "budget": 2,
    "uint2 to uint6": 0,
    "calibrated": 5,
    "int4 and int8": 6,
    "codebook4": 7,
    "llama.cpp": 1,
    "llama.cpp, imatrix": 4,
}


def draw(report: dict[str, Any], out: Path) -> None:
    """Draw the error of each family over its bits, for both models below each other.

    Args:
        report: What `benchmarks.curve` wrote.
        out: The SVG file to write.
    """
    panels = [
        ("MiniLM-L6-v2", "minilm", lambda row: 1 - row["mean_cosine"], "1 - mean cosine of sentence embeddings"),
        ("The demo's Llama", "llama", lambda row: row["divergence_millinats"] / 1000, "divergence, nats per token"),
    ]
    drawn = [
        line_chart(
            f"{title}: error by bits per weight, lower is better",
            [
                Curve(family, tuple(sorted((row[key]["bits"], error(row[key])) for row in _of(report, family))), color)
                for family, color in _FAMILIES.items()
                if _of(report, family)
            ],
            "bits per weight, scales of 16 bits included",
            unit,
            log=True,
            height=260,
        )
        for title, key, error, unit in panels
    ]
    caption = (
        f"{report['minilm']}; {report['llama']}. Weights in bfloat16. Without data, but for those called calibrated "
        "and imatrix; a point is a format, or a budget of so many bits."
    )
    out.write_text(stack("Quality against bits", [[panel] for panel in drawn], caption).standalone(), encoding="utf-8")


def _of(report: dict[str, Any], family: str) -> list[dict[str, Any]]:
    return [row for row in report["rows"] if row["family"] == family]


if __name__ == "__main__":
    draw(json.loads((Path(__file__).parent / "results" / "curve.json").read_text(encoding="utf-8")), DRAWING)
