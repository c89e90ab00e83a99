"""Writes one HTML page that contains everything it shows: it has no scripts and fetches no other file.

Jinja escapes every text that comes from a model. The page's policy also forbids a browser to run scripts.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hf_trainweights.report.drawing import Drawing, printable, style

_CPU_FILE = Path("/proc/cpuinfo")  # only Linux has it


@dataclass(frozen=True)
class Table:
    """A table of texts and drawings; if `folded` is a text, the page shows only that until a reader clicks on it."""

    head: tuple[str, ...]
    rows: Sequence[Sequence[object]]
    folded: str = ""


@dataclass(frozen=True)
class Section:
    """A heading, a paragraph of text, and drawings and tables below it."""

    title: str
    parts: Sequence[Drawing | Table]
    text: str = ""


@dataclass(frozen=True)
class Page:
    """A page of sections; its caption names the versions, the machine and the date."""

    title: str
    caption: str
    sections: Sequence[Section]

    def html(self) -> str:
        """Return the page as HTML."""
        environment = Environment(
            loader=PackageLoader("hf_trainweights.report", ""),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=lambda value: printable(value) if type(value) is str else value,
        )
        environment.tests["drawing"] = lambda value: isinstance(value, Drawing)
        return environment.get_template("page.html").render(page=self, style=Markup(style()))


def default_caption() -> str:
    """Return a caption: the versions of the packages, the machine and the date."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("hf_trainweights", "torch", "transformers"))
    return f"{versions}; {describe_machine()}; {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


def describe_machine() -> str:
    """Return the name of the processor and its number of cores."""
    lines = _CPU_FILE.read_text(encoding="utf-8", errors="replace").splitlines() if _CPU_FILE.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    name = next(names, "") or platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"
