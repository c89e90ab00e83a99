"""Prints the output of `diff` for two models or checkpoints: the tensors that differ, the worst first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_trainweights_cli.console import exit_with, print_json
from hf_trainweights_cli.tables import Table, print_note, print_table, show_error, show_size

if TYPE_CHECKING:
    from hf_trainweights.inspection.difference import Comparison, Difference
    from hf_trainweights.models.choosing.summary import Calibrated

_SHOWN_PROBLEMS = 10

Top = Annotated[
    int | None, typer.Option("--top", min=1, metavar="N", help="Only the N tensors that differ most; totals cover all.")
]


def show_comparison(comparison: Comparison, top: int | None, *, as_json: bool) -> None:
    """Print the tensors that differ, the worst first, the totals and the number of equal tensors; exit on problems."""
    worst_first = sorted(comparison.tensors, key=_badness, reverse=True)
    if as_json:
        tensors = [tensor.to_dict() for tensor in worst_first[:top]]
        print_json({**comparison.to_dict(), "tensors": tensors, "equal": sum(e.is_equal for e in comparison.tensors)})
    else:
        _print(comparison, [tensor for tensor in worst_first if not tensor.is_equal], top)
    hidden = len(comparison.problems) - _SHOWN_PROBLEMS
    exit_with([*comparison.problems[:_SHOWN_PROBLEMS], *([f"{hidden} more; --json has all"] if hidden > 0 else [])])


def _badness(difference: Difference) -> tuple[bool, float, float]:
    """Return a sort key that puts tensors that cannot be compared first, then NaN and infinities, then large errors."""
    errors = (difference.relative_l2, difference.largest)
    l2, largest = (math.inf if math.isnan(error) else error for error in errors)
    return not difference.comparable, l2, largest


def _print(comparison: Comparison, differing: list[Difference], top: int | None) -> None:
    shown = differing[:top]
    table = Table(("tensor",), right=("dB", "L2", "largest", "A", "B"), drop=("A", "B", "largest", "L2"))
    for group in (shown, comparison.totals):
        for difference in group:
            table.add_row(*_row(difference.to_dict()))
        table.add_section()
    print_table(table)
    if comparison.calibrated is not None:
        _print_outputs(comparison.calibrated)
    left_out = len(differing) - len(shown)
    equal = len(comparison.tensors) - len(differing)
    counts = [f"{left_out} more differ"] * bool(left_out) + [f"{equal} of {len(comparison.tensors)} are equal"]
    print_note(f"{', '.join(counts)}; dB: 20 log10 of |a| / |a - b|; L2: |a - b| / |a|; A, B: bytes stored")


def _print_outputs(calibrated: Calibrated) -> None:
    """Print the output errors of each block: calibration lowers these, and raises the errors of single weights."""
    table = Table(("outputs of, % off",), right=("without texts", "with texts"))
    for name, errors in calibrated.blocks.items():
        table.add_row(name, *(f"{100 * error:.3g}" for error in errors))
    print_table(table)


def _row(difference: dict[str, Any]) -> tuple[str, ...]:
    decibels = difference["snr_db"]
    shown = "-" if decibels is None else "equal" if decibels == math.inf else f"{decibels:.1f}"
    errors = (show_error(difference[name]) for name in ("relative_l2", "largest"))
    return difference["name"], shown, *errors, *(show_size(difference[name]) for name in ("bytes_a", "bytes_b"))
