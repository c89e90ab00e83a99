"""Draws bar charts, dot charts, line charts and histograms. Each has a unit, and its legend stands above the chart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hf_trainweights.report.drawing import FONT_SIZE, Drawing, shortened, text_width

WIDTH = 760
_ROW, _BAR = 20, 13
_MARGIN = 8
_LEGEND_CHARACTERS = 32


@dataclass(frozen=True)
class Bar:
    """A row of a bar chart.

    Args:
        label: The name at the row's start.
        parts: A value for each entry of the legend, at least 0; they are drawn one after the other.
        shown: The number at the row's end.
        spread: The smallest and the largest measurement, drawn as a line.
        framed: A value that does not belong to the sum of the parts, at least 0; an empty frame after them shows it.
    """

    label: str
    parts: tuple[float, ...]
    shown: str
    spread: tuple[float, float] | None = None
    framed: float = 0.0


@dataclass(frozen=True)
class Dots:
    """A row of a dot chart: each point is a value and its tooltip, and `shown` is the number at the row's end."""

    label: str
    points: tuple[tuple[float, str], ...]
    shown: str


@dataclass(frozen=True)
class Curve:
    """A curve of a line chart through points (x, y); `color` is the number of a color in `style.css`."""

    label: str
    points: tuple[tuple[float, float], ...]
    color: int
    dashed: bool = False


def bar_chart(
    title: str,
    rows: Sequence[Bar],
    unit: str,
    legend: Sequence[str] = (),
    *,
    width: float = WIDTH,
    reference: float | None = None,
    frame: str = "",
) -> Drawing:
    """Draw one horizontal bar for each row, from top to bottom.

    The legend names the colors in their order and skips a color whose name is empty. A dashed line marks `reference`.
    The legend calls the empty frames `frame`.
    """
    values = [end for row in rows for end in (sum(row.parts) + row.framed, *(row.spread or ()))]
    names: list[tuple[str, int | None]] = [(name, color) for color, name in enumerate(legend) if name]
    names += [(frame, None)] if frame else []
    drawing, top, left, right = _rows(title, rows, names, width)
    axis = axis_of([*values, reference or 0], left, right, zero=True)
    _vertical_grid(drawing, axis, top, len(rows), unit)
    for index, row in enumerate(rows):
        y, x = top + index * _ROW, axis.place(0)
        for color, value in enumerate(row.parts):
            if value > 0:
                name = f", {legend[color]}" if legend else ""
                hint = f"{row.label}{name}: {number(value)} of {row.shown}"
                part_width = axis.place(value) - axis.place(0)
                drawing.rectangle(x, y + (_ROW - _BAR) / 2, part_width, _BAR, color, hint)
                x += part_width
        if row.framed:
            hint = f"{row.label}, {frame}: {number(row.framed)}"
            drawing.rectangle(x, y + (_ROW - _BAR) / 2, axis.place(row.framed) - axis.place(0), _BAR, None, hint)
        if row.spread:
            low, high = map(axis.place, row.spread)
            drawing.line((low, y + _ROW / 2), (high, y + _ROW / 2), "mark")
        _label_row(drawing, row, y, left)
    if reference is not None:
        x = axis.place(reference)
        drawing.line((x, top), (x, top + len(rows) * _ROW), "mark dashed")
    return drawing


def dot_chart(title: str, rows: Sequence[Dots], unit: str) -> Drawing:
    """Draw one row of dots for each of `rows`, a dot for each value."""
    drawing, top, left, right = _rows(title, rows, (), WIDTH)
    axis = axis_of([value for row in rows for value, _ in row.points], left + 6, right)
    _vertical_grid(drawing, axis, top, len(rows), unit)
    for index, row in enumerate(rows):
        y = top + (index + 0.5) * _ROW
        drawing.line((left, y), (right, y))
        for value, hint in row.points:
            drawing.circle(axis.place(value), y, 4, 0, hint)
        _label_row(drawing, row, top + index * _ROW, left)
    return drawing


def line_chart(
    title: str,
    curves: Sequence[Curve],
    x_unit: str,
    y_unit: str,
    *,
    width: float = WIDTH,
    height: float = 220,
    log: bool = False,
) -> Drawing:
    """Draw curves over common axes; with `log` the vertical axis is logarithmic and shows only points above 0."""
    drawing = Drawing(width, 0, title)
    top = _legend(drawing, title, [(curve.label, curve.color) for curve in curves]) + 22
    drawing.text(_MARGIN, top - 10, y_unit)
    shown = [[point for point in curve.points if _is_drawn(point, log)] for curve in curves]
    vertical = axis_of([y for points in shown for _, y in points], top + height, top, log=log, zero=True)
    left = 16 + max((text_width(number(tick)) for tick in vertical.ticks()), default=0)
    ends = [number(points[-1][1]) for points in shown if points]
    right = width - _MARGIN - max((text_width(end) for end in ends), default=0) - 8
    horizontal = axis_of([x for points in shown for x, _ in points], left, right)
    for tick in vertical.ticks():
        y = vertical.place(tick)
        drawing.line((left, y), (horizontal.end, y))
        drawing.text(left - 6, y + 4, number(tick), anchor="end")
    for tick in horizontal.ticks():
        drawing.text(horizontal.place(tick), top + height + 16, number(tick), anchor="middle")
    drawing.text((left + horizontal.end) / 2, top + height + 34, x_unit, anchor="middle")
    for curve, points in zip(curves, shown, strict=True):
        positions = [(horizontal.place(x), vertical.place(y)) for x, y in points]
        drawing.curve(positions, curve.color, dashed=curve.dashed)
        # A circle at each of many points would hide the line.
        for (x, y), (step, value) in zip(positions, points, strict=True) if len(points) <= 40 else ():
            drawing.circle(x, y, 3, curve.color, f"{curve.label}: {number(value)} at {number(step)}")
    _number_the_ends(drawing, [vertical.place(points[-1][1]) for points in shown if points], ends)
    drawing.height = top + height + 44
    return drawing


def histogram(title: str, counts: Sequence[int], low: float, high: float, unit: str, *, log: bool = False) -> Drawing:
    """Draw a histogram; it has no scale of counts, because only its shape matters.

    If `log` is true, a bin is as high as the logarithm of its count, so that rare values stay visible.
    """
    width, height = 220, 70
    left, right = _MARGIN, width - _MARGIN
    drawing = Drawing(width, height + 42, f"{title}: {sum(counts)} values from {number(low)} to {number(high)}")
    step = (right - left) / max(1, len(counts))
    heights = [math.log1p(count) if log else count for count in counts]
    for index, bin_height in enumerate(heights):
        bar = height * bin_height / max(1, *heights)
        # Bins have small gaps: where bins touch, some screens show hairlines between them.
        drawing.rectangle(left + index * step, 4 + height - bar, max(1.0, step * 0.92), bar, 0)
    drawing.line((left, 4 + height), (right, 4 + height))
    drawing.text(left, height + 18, number(low))
    drawing.text(right, height + 18, number(high), anchor="end")
    drawing.text(width / 2, height + 36, unit, anchor="middle")
    return drawing


def _number_the_ends(drawing: Drawing, positions: Sequence[float], numbers: Sequence[str]) -> None:
    """Write the last value of each curve at its end, and move a number down that would cover the one above it."""
    free = -math.inf
    for y, shown in sorted(zip(positions, numbers, strict=True)):
        free = max(y, free + FONT_SIZE + 2)
        drawing.text(drawing.width - _MARGIN, free + 4, shown, "value", "end")


def _rows(
    title: str, rows: Sequence[Bar | Dots], legend: Sequence[tuple[str, int | None]], width: float
) -> tuple[Drawing, float, float, float]:
    """Return a drawing with title and legend, the upper edge of its first row, and the axis's left and right ends."""
    drawing = Drawing(width, 0, title)
    top = _legend(drawing, title, legend)
    labels = max((text_width(shortened(row.label, _most_characters(width))) for row in rows), default=0)
    numbers = max((text_width(row.shown) for row in rows), default=0)
    drawing.height = top + len(rows) * _ROW + 44
    return drawing, top, _MARGIN + labels + 8, width - _MARGIN - numbers - 14


def _most_characters(width: float) -> int:
    return int(0.45 * width / text_width("m"))


def _label_row(drawing: Drawing, row: Bar | Dots, y: float, left: float) -> None:
    drawing.text(left - 8, y + _ROW / 2 + 4, shortened(row.label, _most_characters(drawing.width)), "name", "end")
    drawing.text(drawing.width - _MARGIN, y + _ROW / 2 + 4, row.shown, "value", "end")


def _legend(drawing: Drawing, title: str, entries: Sequence[tuple[str, int | None]]) -> float:
    """Draw the title and the legend, a color or a frame (None) for each entry; return the y below them."""
    y = 20.0
    # The title's letters are larger and bold: 1.3 times as wide.
    drawing.text(_MARGIN, y, shortened(title, int(drawing.width / (1.3 * text_width("m")))), "head")
    if len(entries) > 1:
        x, y = float(_MARGIN), y + 20
        for name, color in entries:
            name = shortened(name, _LEGEND_CHARACTERS)
            step = 18 + text_width(name) + 14
            if x > _MARGIN and x + step > drawing.width:
                x, y = float(_MARGIN), y + 18
            drawing.rectangle(x, y - 10, 12, 11, color)
            drawing.text(x + 18, y, name)
            x += step
    return y + 12


def _vertical_grid(drawing: Drawing, axis: Axis, top: float, rows: int, unit: str) -> None:
    bottom = top + rows * _ROW
    for tick in axis.ticks(6 if axis.end - axis.start > 240 else 4):
        x = axis.place(tick)
        drawing.line((x, top), (x, bottom))
        drawing.text(x, bottom + 14, number(tick), anchor="middle")
    # The unit's name may be longer than the axis, so keep it inside the drawing.
    half = text_width(unit) / 2
    middle = max(_MARGIN + half, min((axis.start + axis.end) / 2, drawing.width - _MARGIN - half))
    drawing.text(middle, bottom + 32, unit, anchor="middle")


def _is_drawn(point: tuple[float, float], log: bool) -> bool:
    return all(map(math.isfinite, point)) and (point[1] > 0 or not log)


@dataclass(frozen=True)
class Axis:
    """An axis from value `low` at pixel `start` to value `high` at pixel `end`; if it is logarithmic, `low` > 0."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        """Return the pixel of a value; a value beyond the axis gets the pixel of the nearer end."""
        value = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """Return round values on the axis, at most `most` of them."""
        candidates = _log_steps(self.low, self.high) if self.log else _even_steps(self.low, self.high)
        best: list[float] = []
        for values in candidates:
            if len(values) > most:
                break
            best = values
        return best


def axis_of(values: list[float], start: float, end: float, *, log: bool = False, zero: bool = False) -> Axis:
    """Return an axis that shows all finite values, if `log` all positive ones; `zero` adds 0 to a linear axis."""
    shown = [value for value in values if math.isfinite(value) and not (log and value <= 0)] or [1.0]
    low, high = min(shown), max(shown)
    if zero and not log:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        low, high = (low / 2, high * 2) if log else (low - (0 if zero and low == 0 else 1), high + 1)
    return Axis(low, high, start, end, log)


def _even_steps(low: float, high: float) -> list[list[float]]:
    """Return several choices of ticks, each with more ticks than the one before."""
    choices = []
    power = math.floor(math.log10(high - low)) + 1
    for exponent in (power, power - 1, power - 2):
        for digit in (5, 2.5, 2, 1):
            step = digit * 10.0**exponent
            first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
            choices.append([count * step for count in range(first, last + 1)])
    return choices


def _log_steps(low: float, high: float) -> list[list[float]]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    choices = []
    sets = [((1,), every) for every in (4, 3, 2, 1)] + [((1, 3), 1), ((1, 2, 5), 1), ((1, 2, 3, 4, 5, 7), 1)]
    for digits, every in sets:
        values = [digit * 10.0**power for power in range(first, last + 1) if power % every == 0 for digit in digits]
        choices.append([value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)])
    return choices


def number(value: float) -> str:
    """Return a number with three significant digits; from 1,000 to 100,000 show all digits instead of an exponent.

    Examples:
        >>> number(0.5), number(2000.0), number(0.00001), number(1234567)
        ('0.5', '2000', '1e-05', '1.23e+06')
    """
    text = f"{value:.3g}"
    return f"{value:.0f}" if "e" in text and 1000 <= abs(value) < 100_000 else text


def size_unit(largest_bytes: float) -> tuple[float, str]:
    """Return the number of bytes in the unit that suits a size, and the unit's name.

    Examples:
        >>> size_unit(90_900_000)
        (1000000.0, 'MB')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest_bytes >= unit:
            return unit, name
    return 1.0, "B"


def size(count: float) -> str:
    """Return a number of bytes as text with a unit.

    Examples:
        >>> size(90_900_000), size(12)
        ('90.9 MB', '12 B')
    """
    unit, name = size_unit(count)
    return f"{count / unit:.1f} {name}" if unit > 1 else f"{count:.0f} B"
