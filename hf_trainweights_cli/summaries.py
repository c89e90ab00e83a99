"""Shows the formats and bytes of a model's weights after quantizing, as a table or as JSON."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hf_trainweights_cli.console import say
from hf_trainweights_cli.tables import Table, print_table, show_sizes

if TYPE_CHECKING:
    from hf_trainweights.models.choosing.summary import Choice, Summary


def summary_as_json(summary: Summary) -> dict[str, Any]:
    """Return the choice for each tensor and the total bytes as a dict for JSON."""
    totals = {"bytes_before": summary.bytes_before, "bytes_after": summary.bytes_after}
    if summary.calibrated is not None:
        totals |= asdict(summary.calibrated)
    return {**totals, "tensors": [_choice_as_json(choice) for choice in summary.tensors]}


def _choice_as_json(choice: Choice) -> dict[str, Any]:
    fields = {name: getattr(choice, name) for name in ("name", "reason", "numel", "bytes_before", "bytes_after")}
    return {**fields, "format": choice.format and choice.format.get_config()}


def print_summary(summary: Summary) -> None:
    """Print the number of tensors in each format, and their bytes."""
    groups: dict[tuple[str, str], list[Choice]] = defaultdict(list)
    for choice in summary.tensors:
        groups[str(choice.format or "float"), choice.reason].append(choice)
    table = Table(
        ("format",), right=("tensors", "before", "after", "ratio"), drop=("before", "tensors"), labels=("format",)
    )
    # Quantized tensors come first. Float tensors are grouped by the reason why they stay float.
    for (shown, reason), choices in sorted(groups.items(), key=lambda group: group[0][0] == "float"):
        totals = (sum(getattr(choice, name) for choice in choices) for name in ("bytes_before", "bytes_after"))
        table.add_row(f"{shown}: {reason}" if reason else shown, len(choices), *show_sizes(*totals))
    table.add_section()
    table.add_row("total", len(summary.tensors), *show_sizes(summary.bytes_before, summary.bytes_after))
    print_table(table)
    for remark in summary.remarks:
        say(remark)
