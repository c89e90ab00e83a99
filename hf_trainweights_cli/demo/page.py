"""Draws the demo's results into one HTML page."""

from __future__ import annotations

from hf_trainweights.report.charts import Bar, Curve, bar_chart, line_chart, size
from hf_trainweights.report.page import Page, Section, Table, default_caption
from hf_trainweights.report.runs import run_sections
from hf_trainweights_cli.demo.checkpoints import Checkpoints
from hf_trainweights_cli.demo.run import Result
from hf_trainweights_cli.demo.speed import Speed

_FLOAT, _QUANTIZED = 3, 0


def demo_page(result: Result) -> Page:
    """Return the page of a demo's results."""
    sections = [_quality(result)]
    if result.speeds:
        sections.append(_speed(result.speeds))
    if result.checkpoints:
        sections += _checkpoints(result.checkpoints, result.losses)
    return Page(f"trainweights demo: {result.model}", default_caption(), sections)


def _quality(result: Result) -> Section:
    bars = [
        _bar(row.format, row.disk_bytes / 1e6, size(row.disk_bytes), index) for index, row in enumerate(result.rows)
    ]
    rows = [
        (row.format, f"{row.bits_per_weight:.2f}", f"{row.perplexity:.3f}", "FAILED" if row.failures else "bit-equal")
        for row in result.rows
    ]
    text = f"{result.model}; perplexity on held-out files of the {result.held_out}. Lower is better."
    table = Table(("format", "bits per weight", "perplexity", "saved and reloaded"), rows)
    return Section("Size and quality", [bar_chart("On disk", bars, "MB"), table], text)


def _speed(speeds: tuple[Speed, ...]) -> Section:
    memory = [
        _bar(row.format, row.memory_bytes / 1e6, f"{size(row.memory_bytes)}, {row.times_smaller:.2f}x smaller", index)
        for index, row in enumerate(speeds)
    ]
    faster = [_bar(row.format, row.times_faster, f"{row.times_faster:.2f}x", i) for i, row in enumerate(speeds)]
    charts = [
        bar_chart("Memory of the weights", memory, "MB"),
        bar_chart("Speed of decoding", faster, f"times the speed of {speeds[0].format}", reference=1),
    ]
    text = (
        "A Llama of 105M random weights, one token a call, each format in turns with the float model. The machine is "
        "named above; on another one the order may be another."
    )
    return Section("Memory and speed", charts, text)


def _checkpoints(checkpoints: Checkpoints, losses: tuple[float, ...]) -> list[Section]:
    curves = [Curve("without a break", tuple(enumerate(losses, start=1)), _FLOAT)]
    if checkpoints.resumed_at is not None:
        start = checkpoints.resumed_at + 1
        points = tuple(enumerate(checkpoints.resumed_losses, start=start))
        curves.append(Curve(f"resumed from step {checkpoints.resumed_at}", points, _QUANTIZED))
    (sizes,) = run_sections(checkpoints.saved, {})
    return [sizes, Section("Loss", [line_chart("Loss of the training", curves, "step", "nats per token")])]


def _bar(label: str, value: float, shown: str, index: int) -> Bar:
    """Return a bar, in the color of the float model if its index is 0, otherwise in the color of formats."""
    color = _QUANTIZED if index else _FLOAT
    return Bar(label, (*(0.0 for _ in range(color)), value), shown)
