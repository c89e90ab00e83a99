"""One HTML page that holds all it shows: no script, no other file, nothing that is fetched.

Jinja escapes whatever comes from a model; a browser that honors the page's policy would not run a script either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hf_trainweights.report.drawing import Drawing, printable, style
from hf_trainweights.report.machine import describe_machine, describe_versions


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
    return f"{describe_versions()}; {describe_machine()}; {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
