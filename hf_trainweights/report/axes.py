"""Axes of charts: round numbers, their places, and sizes as people read them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """The values that an axis shows, `low` above 0 on a logarithmic one, between the pixels `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        """Return the pixel of a value; one beyond the axis is moved to its end."""
        value = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """Return at most so many round values of the axis."""
        candidates = _log_steps(self.low, self.high) if self.log else _even_steps(self.low, self.high)
        best: list[float] = []
        for values in candidates:
            if len(values) > most:
                break
            best = values
        return best


def axis_of(values: list[float], start: float, end: float, *, log: bool = False, zero: bool = False) -> Axis:
    """Return an axis that shows all values, of a logarithmic one those above 0; with `zero` it begins at 0 or below."""
    shown = [value for value in values if math.isfinite(value) and not (log and value <= 0)] or [1.0]
    low, high = min(shown), max(shown)
    if zero and not log:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        low, high = (low / 2, high * 2) if log else (low - (0 if zero and low == 0 else 1), high + 1)
    return Axis(low, high, start, end, log)


def _even_steps(low: float, high: float) -> list[list[float]]:
    """Return ticks for axes of more and more of them."""
    found = []
    power = math.floor(math.log10(high - low)) + 1
    for exponent in (power, power - 1, power - 2):
        for digit in (5, 2.5, 2, 1):
            step = digit * 10.0**exponent
            first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
            found.append([count * step for count in range(first, last + 1)])
    return found


def _log_steps(low: float, high: float) -> list[list[float]]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    found = []
    sets = [((1,), every) for every in (4, 3, 2, 1)] + [((1, 3), 1), ((1, 2, 5), 1), ((1, 2, 3, 4, 5, 7), 1)]
    for digits, every in sets:
        values = [digit * 10.0**power for power in range(first, last + 1) if power % every == 0 for digit in digits]
        found.append([value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)])
    return found


def number(value: float) -> str:
    """Return a number in a few characters, without an exponent where that is short.

    Examples:
        >>> number(0.5), number(2000.0), number(0.00001), number(1234567)
        ('0.5', '2000', '1e-05', '1.23e+06')
    """
    text = f"{value:.3g}"
    return f"{value:.0f}" if "e" in text and 1000 <= abs(value) < 100_000 else text


def size_unit(largest_bytes: float) -> tuple[float, str]:
    """Return the unit in which a size is a number of few digits, and its name.

    Examples:
        >>> size_unit(90_900_000)
        (1000000.0, 'MB')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest_bytes >= unit:
            return unit, name
    return 1.0, "B"


def size(count: float) -> str:
    """Return a number of bytes as people read it.

    Examples:
        >>> size(90_900_000), size(12)
        ('90.9 MB', '12 B')
    """
    unit, name = size_unit(count)
    return f"{count / unit:.1f} {name}" if unit > 1 else f"{count:.0f} B"
