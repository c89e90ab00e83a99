"""Builds SVG drawings of escaped text, rectangles, lines and circles, in the colors of `style.css`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files

from markupsafe import Markup

# The widest of the fonts that `style.css` names needs 0.6 of its size for a character on average.
_CHARACTER = 0.62
FONT_SIZE = 12
COLORS = 8


def printable(text: object) -> str:
    """Escape the control characters in a text: a weight's name may contain any of them, and XML allows only a few."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def shortened(text: object, characters: int) -> str:
    """Cut the middle out of a text that has more characters than this.

    Examples:
        >>> shortened("model.layers.0.mlp.up_proj", 15)
        'model.l…up_proj'
    """
    shown = printable(text)
    head = (characters - 1) // 2
    return shown if len(shown) <= characters else f"{shown[:head]}…{shown[len(shown) - (characters - 1 - head) :]}"


def text_width(text: str) -> float:
    """Return an estimate of a text's width in pixels, mostly too large: SVG cannot measure fonts."""
    return _CHARACTER * FONT_SIZE * len(text)


@cache
def style() -> str:
    """Return the style sheet of all drawings."""
    return (files("hf_trainweights.report") / "style.css").read_text(encoding="utf-8")


class Drawing:
    """An SVG drawing, measured in pixels. It escapes every text that it is given.

    `height` may change until `inline` or `standalone` returns the drawing. Screen readers read the title.
    """

    def __init__(self, width: float, height: float, title: str):
        self.width = width
        self.height = height
        self.title = title
        self._elements: list[Markup] = []

    def text(self, x: float, y: float, text: object, kind: str = "", anchor: str = "start") -> None:
        """Add a line of text, its `start`, `middle` or `end` at x, its base line at y; `kind` is a CSS class."""
        template = '<text x="{:.1f}" y="{:.1f}" class="{}" text-anchor="{}">{}</text>'
        self._add(template, x, y, kind, anchor, printable(text))

    def rectangle(self, x: float, y: float, width: float, height: float, color: int | None, title: str = "") -> None:
        """Add a rectangle by its left and upper edges, an empty frame if `color` is None; `title` is a tooltip."""
        template = '<rect x="{:.1f}" y="{:.1f}" width="{:.2f}" height="{:.2f}" class="{}">{}</rect>'
        self._add(template, x, y, width, height, "frame" if color is None else f"s{color % COLORS}", _hint(title))

    def circle(self, x: float, y: float, radius: float, color: int, title: str = "") -> None:
        """Add a filled circle by its middle; `title` is a tooltip."""
        template = '<circle cx="{:.1f}" cy="{:.1f}" r="{}" class="s{}" fill-opacity="0.8">{}</circle>'
        self._add(template, x, y, radius, color % COLORS, _hint(title))

    def line(self, start: tuple[float, float], end: tuple[float, float], kind: str = "grid") -> None:
        """Add a straight line; `kind` names CSS classes: `grid` or `mark`, and perhaps `dashed`."""
        self._add('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="{}"/>', *start, *end, kind)

    def curve(self, points: Iterable[tuple[float, float]], color: int, *, dashed: bool = False) -> None:
        """Add a line that connects the points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._add('<polyline points="{}" class="curve s{}{}"/>', path, color % COLORS, " dashed" * dashed)

    def place(self, other: Drawing, x: float, y: float) -> None:
        """Add a copy of another drawing, its left edge at x and its upper edge at y."""
        self._elements.append(Markup('<g transform="translate({:.1f} {:.1f})">').format(x, y))
        self._elements += [*other._elements, Markup("</g>")]

    def inline(self) -> Markup:
        """Return the drawing as an element of an HTML page; the page contains `style()`."""
        return self._svg(Markup('class="chart"'), Markup(""))

    def standalone(self, *, page: bool = False) -> str:
        """Return the text of an SVG file that contains its own style sheet.

        If `page` is true, the file paints a background, white or dark, for a viewer that shows it alone. Otherwise it
        is transparent, for a page that includes it.
        """
        sheet = Markup("<style>\n{}</style>\n").format(Markup(style()))
        if page:
            sheet += Markup('<rect width="100%" height="100%" class="page"/>\n')
        return self._svg(Markup('xmlns="http://www.w3.org/2000/svg"'), sheet) + "\n"

    def _svg(self, attributes: Markup, sheet: Markup) -> Markup:
        template = '<svg {} viewBox="0 0 {:.0f} {:.0f}" width="{:.0f}" height="{:.0f}" role="img">\n{}{}{}\n</svg>'
        elements = Markup("\n").join(self._elements)
        size = (self.width, self.height) * 2
        return Markup(template).format(attributes, *size, _hint(self.title), sheet, elements)

    def _add(self, template: str, *values: object) -> None:
        self._elements.append(Markup(template).format(*values))


def _hint(title: str) -> Markup:
    return Markup("<title>{}</title>").format(printable(title)) if title else Markup("")


def stack(title: str, rows: Sequence[Sequence[Drawing]], caption: str = "") -> Drawing:
    """Combine drawings: place each row of them side by side, the rows one below the other, and a caption below all."""
    combined = Drawing(max(sum(drawing.width for drawing in row) for row in rows), 0, title)
    for row in rows:
        x = 0.0
        for drawing in row:
            combined.place(drawing, x, combined.height)
            x += drawing.width
        combined.height += max(drawing.height for drawing in row)
    for line in textwrap.wrap(printable(caption), int((combined.width - 16) / text_width("m"))):
        combined.text(8, combined.height + FONT_SIZE, line)
        combined.height += 1.5 * FONT_SIZE
    combined.height += 8 if caption else 0
    return combined
