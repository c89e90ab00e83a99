"""The sections of a report on a training run: what each checkpoint takes, and the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hf_trainweights.report.axes import size, size_unit
from hf_trainweights.report.charts import Bar, Curve, bar_chart, line_chart
from hf_trainweights.report.page import Section, Table
from hf_trainweights.report.runs import PARTS, SavedCheckpoint

_MOST_ROWS = 120


def run_sections(
    checkpoints: Sequence[SavedCheckpoint], losses: Mapping[str, Sequence[tuple[float, float]]]
) -> list[Section]:
    """Return the sections on a run.

    Args:
        checkpoints: Its checkpoints, the first one first.
        losses: Its losses by name, as steps and values.
    """
    shown = checkpoints[-_MOST_ROWS:]
    unit, unit_name = size_unit(max(sum(each.part_bytes) for each in shown))
    bars = [
        Bar(f"step {each.step}", tuple(count / unit for count in each.part_bytes), _show_ratio(each)) for each in shown
    ]
    left_out = len(checkpoints) - len(shown)
    title = "Bytes of each checkpoint" + (f" (the first {left_out} are left out)" if left_out else "")
    rows = [
        (f"step {each.step}", each.mode, *map(size, each.part_bytes), size(each.plain_bytes)) for each in checkpoints
    ]
    table = Table(("checkpoint", "mode", *PARTS, "without encoding"), rows, f"{len(rows)} checkpoints")
    sections = [Section("Checkpoints", [bar_chart(title, bars, unit_name, PARTS), table])]
    if losses:
        curves = [Curve(name, tuple(points), color) for color, (name, points) in enumerate(losses.items())]
        sections.append(Section("Loss", [line_chart("Loss", curves, "step", "loss")]))
    return sections


def describe_run(checkpoints: Sequence[SavedCheckpoint]) -> str:
    """Return in a line what a run takes.

    Args:
        checkpoints: Its checkpoints, at least one.
    """
    stored, plain = sum(sum(each.part_bytes) for each in checkpoints), sum(each.plain_bytes for each in checkpoints)
    return f"{len(checkpoints)} checkpoints, {size(plain)} without encoding, {size(stored)} on disk"


def _show_ratio(each: SavedCheckpoint) -> str:
    stored = sum(each.part_bytes)
    ratio = each.plain_bytes / stored if stored else 1.0
    return size(stored) + (f", {ratio:.1f}x smaller" if ratio > 1.05 else "")
