"""By how much the values of a checkpoint are off from those that training wrote, whatever was done to it since.

A file that was rounded stays rounded when it is encoded once more without a loss, and when it is restored. So the
manifest says of each file what it had lost before it was encoded as it is, and each report what encoding it cost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from hf_trainweights.checkpoint.manifest.manifest import Manifest
from hf_trainweights.checkpoint.planning.modes import MODES

PLAIN_MODE = "plain"

_EXACT_MODES = (PLAIN_MODE, MODES[0])
_RANKS = {mode: rank for rank, mode in enumerate((PLAIN_MODE, *MODES))}


def reported_rounding(report: Mapping[str, Any]) -> dict[str, float]:
    """Return by role the largest error of an element that encoding a file cost, in the codec's unit, if any."""
    largest: dict[str, float] = {}
    for tensor in report.get("tensors", ()):
        if tensor["bound"]:
            largest[tensor["role"]] = max(tensor["bound"], largest.get(tensor["role"], 0.0))
    return largest


def add_rounding(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Return the error by role of values that were rounded twice."""
    return {role: first.get(role, 0.0) + second.get(role, 0.0) for role in {**first, **second}}


def total_rounding(manifest: Manifest) -> dict[str, float]:
    """Return by role the largest error of an element of a checkpoint; nothing for a role that is exact."""
    totals: dict[str, float] = {}
    for name, entry in manifest.files.items():
        of_file = add_rounding(manifest.rounded_before.get(name, {}), reported_rounding(entry.report))
        for role, bound in of_file.items():
            totals[role] = max(bound, totals.get(role, 0.0))
    return totals


def with_earlier_rounding(manifest: Manifest, previous: Manifest | None, encoded: Collection[str]) -> Manifest:
    """Carry into a new manifest what the previous one knows of rounding; `encoded` are files that were encoded since.

    Its mode becomes the lossiest that a file in it was stored by.
    """
    if previous is None:
        return manifest
    before: dict[str, dict[str, float]] = {}
    mode = manifest.mode
    for name, entry in previous.files.items():
        of_encoding = reported_rounding(entry.report)
        lost = add_rounding(previous.rounded_before.get(name, {}), of_encoding if name in encoded else {})
        if lost and name in manifest.files:
            before[name] = lost
        if of_encoding and name in manifest.files and name not in encoded:
            mode = max(mode, previous.mode, key=lambda each: _RANKS.get(each, len(_RANKS)))
    return replace(manifest, mode=mode, rounded_before=before)


def shown_mode(manifest: Manifest) -> str:
    """Return the mode of a checkpoint as people read it, e.g. `lossless (weights off by up to 1.1e-03)`."""
    totals = total_rounding(manifest)
    if not totals or not (manifest.mode in _EXACT_MODES or manifest.rounded_before):
        return manifest.mode
    weights = totals.get("weight")
    what = "optimizer states rounded" if weights is None else f"weights off by up to {weights:.1e}"
    return f"{manifest.mode} ({what})"
