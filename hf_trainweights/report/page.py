"""One HTML page that holds all it shows: no script, no other file, nothing that is fetched.

Jinja escapes whatever comes from a model; a browser that honors the page's policy would not run a script either.
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

_CPU_FILE = Path("/proc/cpuinfo")  # of Linux


@dataclass(frozen=True)
class Table:
    """A table of texts and drawings; if `folded` is given, it shows only these words until someone opens it."""

    head: tuple[str, ...]
    rows: Sequence[Sequence[object]]
    folded: str = ""


@dataclass(frozen=True)
class Section:
    """A part of a page under a heading; `text` is a paragraph before the others."""

    title: str
    parts: Sequence[Drawing | Table]
    text: str = ""


@dataclass(frozen=True)
class Page:
    """A page; its caption says what it was made of, with what, and when."""

    title: str
    caption: str
    sections: Sequence[Section]

    def html(self) -> str:
        """Return the text of the file."""
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
    """Return the versions, the machine and the date."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("hf_trainweights", "torch", "transformers"))
    return f"{versions}; {describe_machine()}; {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


def describe_machine() -> str:
    """Return the processor and its number of cores, as people read them."""
    lines = _CPU_FILE.read_text(encoding="utf-8", errors="replace").splitlines() if _CPU_FILE.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    name = next(names, "") or platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"
