"""The tables of docs/architectures.md, from the results of `python -m tests.every_architecture`."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from benchmarks.markdown import table

KINDS = ("right", "refused", "RED", "not asked")
_SHOWN = 6  # classes of one reason


def outcomes(report: dict[str, Any]) -> str:
    """Count the outcomes of each cell."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for row in report["rows"].values():
        for cell, text in row["cells"].items():
            counts[cell][_kind(text)] += 1
    rows = [[cell, *(str(count[kind]) for kind in KINDS)] for cell, count in counts.items()]
    built = [row for row in report["rows"].values() if row["built"] is True]
    is_run = sum("not run" not in row for row in built)
    versions = ", ".join(f"{name} {report['versions'][name]}" for name in ("transformers", "torch"))
    caption = (
        f"{len(report['rows'])} model types: {len(built)} classes were built, and for {is_run} of them inputs are "
        f"known. {report['date']}, commit {report['commit'][:7]}; {versions}."
    )
    return f"{table(['cell', 'right', 'refused', 'wrong', 'not asked'], rows)}\n\n{caption}"


def wrong(report: dict[str, Any]) -> str:
    """List the wrong cells, those of one error in a row."""
    return _by_reason(report, "RED") or "Nothing."


def refused(report: dict[str, Any]) -> str:
    """List the refusals, those of one error in a row."""
    return _by_reason(report, "refused")


def left_out(report: dict[str, Any]) -> str:
    """List the classes that were not built, not run, or not loaded by Transformers itself, with the reason."""
    reasons: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for name, row in report["rows"].items():
        if row["built"] is not True:
            reasons["not built", _reason(row["built"])].append(name)
        for key in ("not run", "not reloaded by Transformers"):
            if key in row:
                reasons[key, _reason(row[key])].append(name)
    lines = sorted(reasons.items(), key=lambda item: (item[0][0], -len(item[1]), item[0][1]))
    rows = [[kind, reason, _types(names)] for (kind, reason), names in lines]
    return table(["", "reason", "model types"], rows)


def _by_reason(report: dict[str, Any], kind: str) -> str:
    """List the classes with an outcome, those of one reason in a row."""
    reasons: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, row in report["rows"].items():
        for cell, text in row["cells"].items():
            if _kind(text) == kind:
                reasons[_reason(text.removeprefix(f"{kind}: ").removeprefix("RED, "))][name].append(cell)
    ordered = sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0]))
    rows = [[reason, "; ".join(_unique(names.values())), _types(names)] for reason, names in ordered]
    return table(["reason", "cells", "model types"], rows) if rows else ""


def _reason(text: str) -> str:
    """Return an error without the names, the numbers and the next step, which differ between classes of one kind."""
    text = re.sub(r"(, found .*?)\. [A-Z].*|\(\S+:\d+\)$", r"\1", text)
    text = re.sub(r"(\w+\.)+(\w+|\*)\S*(, (\w+\.)+\S+)*( and \d+ more)?", "…", text)
    text = re.sub(r"\b[A-Z][A-Za-z0-9_]+(Layer|Model|Config|ForConditionalGeneration|ForCausalLM)\b", "…", text)
    text = re.sub(r"written/\w+: |[-\w]*…[-\w]*", "…", text)
    text = re.sub(r"…([,.' ]*(and \d+ more?)?…)*( and \d+ \w*$)?", "…", text)
    text = re.sub(r"\d+(,\d{3})*(\.\d+)?(e-?\d+)?", "N", text)
    return text.strip().replace("|", "\\|")[:150]


def _unique(groups: Iterable[list[str]]) -> list[str]:
    return list(dict.fromkeys(name for group in groups for name in group))


def _types(names: Iterable[str]) -> str:
    """Return the first model types of some classes, and how many more there are."""
    types = [name.partition(" ")[0] for name in names]
    return ", ".join(types[:_SHOWN]) + (f" and {len(types) - _SHOWN} more" if len(types) > _SHOWN else "")


def _kind(outcome: str) -> str:
    return re.split("[:,]", outcome, maxsplit=1)[0]
