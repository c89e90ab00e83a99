"""SVG drawings: escaped text, rectangles, lines and circles, in the colors of `style.css`."""

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
    """Return a text whose control characters are escaped: a name may hold any, and XML allows few of them."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in str(text))


def shortened(text: object, characters: int) -> str:
    """Return a text of at most this many characters; of a longer one, the middle is left out.

    Examples:
        >>> shortened("model.layers.0.mlp.up_proj", 15)
        'model.l…up_proj'
    """
    shown = printable(text)
    head = (characters - 1) // 2
    return shown if len(shown) <= characters else f"{shown[:head]}…{shown[len(shown) - (characters - 1 - head) :]}"


def text_width(text: str) -> float:
    """Return the width in pixels that a text takes at most, as a rule: SVG cannot measure fonts."""
    return _CHARACTER * FONT_SIZE * len(text)


@cache
def style() -> str:
    """Return the style sheet of all drawings."""
    return (files("hf_trainweights.report") / "style.css").read_text(encoding="utf-8")


class Drawing:
    """An SVG drawing, measured in pixels; whatever text comes in is escaped.

    `height` may be changed until the drawing is taken out. The title is for people who do not see it.
    """

    def __init__(self, width: float, height: float, title: str):
        self.width = width
        self.height = height
        self.title = title
        self._elements: list[Markup] = []

    def text(self, x: float, y: float, text: object, kind: str = "", anchor: str = "start") -> None:
        """Add a line of text of a class of `style.css`: its `start`, `middle` or `end` at x, its base line at y."""
        form = '<text x="{:.1f}" y="{:.1f}" class="{}" text-anchor="{}">{}</text>'
        self._add(form, x, y, kind, anchor, printable(text))

    def rectangle(self, x: float, y: float, width: float, height: float, color: int | None, title: str = "") -> None:
        """Add a rectangle by its left and upper edges, an empty frame without a color; see `circle` for the title."""
        form = '<rect x="{:.1f}" y="{:.1f}" width="{:.2f}" height="{:.2f}" class="{}">{}</rect>'
        self._add(form, x, y, width, height, "frame" if color is None else f"s{color % COLORS}", _hint(title))

    def circle(self, x: float, y: float, radius: float, color: int, title: str = "") -> None:
        """Add a filled circle by its middle; its title is shown where the pointer rests."""
        form = '<circle cx="{:.1f}" cy="{:.1f}" r="{}" class="s{}" fill-opacity="0.8">{}</circle>'
        self._add(form, x, y, radius, color % COLORS, _hint(title))

    def line(self, start: tuple[float, float], end: tuple[float, float], kind: str = "grid") -> None:
        """Add a straight line of the classes `grid` or `mark`, and `dashed`, of `style.css`."""
        self._add('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="{}"/>', *start, *end, kind)

    def curve(self, points: Iterable[tuple[float, float]], color: int, *, dashed: bool = False) -> None:
        """Add a line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._add('<polyline points="{}" class="curve s{}{}"/>', path, color % COLORS, " dashed" * dashed)

    def place(self, other: Drawing, x: float, y: float) -> None:
        """Add a copy of another drawing, its left edge at x and its upper edge at y."""
        self._elements.append(Markup('<g transform="translate({:.1f} {:.1f})">').format(x, y))
        self._elements += [*other._elements, Markup("</g>")]

    def inline(self) -> Markup:
        """Return the drawing as an element of an HTML page that holds `style()`."""
        return self._svg(Markup('class="chart"'), Markup(""))

    def standalone(self, *, page: bool = False) -> str:
        """Return the text of an SVG file, with its own style.

        With `page` it paints the background, white or dark, for a viewer that shows the file alone; else that of the
        page into which it is put shows through.
        """
        sheet = Markup("<style>\n{}</style>\n").format(Markup(style()))
        if page:
            sheet += Markup('<rect width="100%" height="100%" class="page"/>\n')
        return self._svg(Markup('xmlns="http://www.w3.org/2000/svg"'), sheet) + "\n"

    def _svg(self, attributes: Markup, sheet: Markup) -> Markup:
        form = Markup('<svg {} viewBox="0 0 {:.0f} {:.0f}" width="{:.0f}" height="{:.0f}" role="img">\n{}{}{}\n</svg>')
        elements = Markup("\n").join(self._elements)
        size = (self.width, self.height) * 2
        return form.format(attributes, *size, _hint(self.title), sheet, elements)

    def _add(self, form: str, *values: object) -> None:
        self._elements.append(Markup(form).format(*values))


def _hint(title: str) -> Markup:
    return Markup("<title>{}</title>").format(printable(title)) if title else Markup("")


def stack(title: str, rows: Sequence[Sequence[Drawing]], caption: str = "") -> Drawing:
    """Return one drawing of several: rows of drawings beside each other, and a text below."""
    whole = Drawing(max(sum(each.width for each in row) for row in rows), 0, title)
    for row in rows:
        x = 0.0
        for drawing in row:
            whole.place(drawing, x, whole.height)
            x += drawing.width
        whole.height += max(drawing.height for drawing in row)
    for line in textwrap.wrap(printable(caption), int((whole.width - 16) / text_width("m"))):
        whole.text(8, whole.height + FONT_SIZE, line)
        whole.height += 1.5 * FONT_SIZE
    whole.height += 8 if caption else 0
    return whole
