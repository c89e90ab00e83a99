"""Pictures of a training run: what each checkpoint takes, and the loss; as sections of a report, or as one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hf_trainweights.report.axes import size, size_unit
from hf_trainweights.report.charts import WIDTH, Bar, Curve, bar_chart, line_chart
from hf_trainweights.report.drawing import Drawing, stack
from hf_trainweights.report.page import Section, Table
from hf_trainweights.report.runs import PARTS, SavedCheckpoint

_MOST_ROWS = 120
_LINKED = "link to an anchor, no bytes"
_BESIDE_WIDTH, _BESIDE_HEIGHT = 440, 160


def run_sections(
    checkpoints: Sequence[SavedCheckpoint], losses: Mapping[str, Sequence[tuple[float, float]]]
) -> list[Section]:
    """Return the sections on a run, whose losses are steps and values by name."""
    rows = [
        (f"step {each.step}", each.mode, *map(size, (*each.part_bytes, each.linked_bytes, each.plain_bytes)))
        for each in checkpoints
    ]
    head = ("checkpoint", "mode", *PARTS, "linked", "without encoding")
    table = Table(head, rows, f"{len(rows)} checkpoints")
    sections = [Section("Checkpoints", [_sizes_chart(checkpoints), table])]
    if losses:
        sections.append(Section("Loss", [_loss_chart(losses, WIDTH, 220)]))
    return sections


def run_picture(
    title: str, checkpoints: Sequence[SavedCheckpoint], losses: Mapping[str, Sequence[tuple[float, float]]]
) -> Drawing:
    """Return a run as one picture: what each checkpoint takes, and beside it the loss, if there is any."""
    charts = [_sizes_chart(checkpoints)] + ([_loss_chart(losses, _BESIDE_WIDTH, _BESIDE_HEIGHT)] if losses else [])
    return stack(title, [charts], f"{title}: {describe_run(checkpoints)}")


def describe_run(checkpoints: Sequence[SavedCheckpoint]) -> str:
    """Return in a line what a run takes."""
    stored, plain = sum(sum(each.part_bytes) for each in checkpoints), sum(each.plain_bytes for each in checkpoints)
    return f"{len(checkpoints)} checkpoints, {size(plain)} without encoding, {size(stored)} on disk"


def _sizes_chart(checkpoints: Sequence[SavedCheckpoint]) -> Drawing:
    shown = checkpoints[-_MOST_ROWS:]
    unit, unit_name = size_unit(max(sum(each.part_bytes) for each in shown))
    bars = [
        Bar(
            f"step {each.step}",
            tuple(count / unit for count in each.part_bytes),
            _show_ratio(each),
            framed=each.linked_bytes / unit,
        )
        for each in shown
    ]
    left_out = len(checkpoints) - len(shown)
    title = "Bytes of each checkpoint" + (f" (the first {left_out} are left out)" if left_out else "")
    frame = _LINKED if any(each.linked_bytes for each in shown) else ""
    return bar_chart(title, bars, unit_name, PARTS, frame=frame)


def _loss_chart(losses: Mapping[str, Sequence[tuple[float, float]]], width: float, height: float) -> Drawing:
    curves = [Curve(name, tuple(points), color) for color, (name, points) in enumerate(losses.items())]
    return line_chart("Loss", curves, "step", "loss", width=width, height=height)


def _show_ratio(each: SavedCheckpoint) -> str:
    stored = sum(each.part_bytes)
    ratio = each.plain_bytes / stored if stored else 1.0
    return size(stored) + (f", {ratio:.2f}x smaller" if ratio >= 1.005 else "")
