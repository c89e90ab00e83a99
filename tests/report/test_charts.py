"""Charts: no text covers another one or leaves the drawing, and values are where the axes say."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hf_trainweights.report.charts import (
    Bar,
    Curve,
    Dots,
    axis_of,
    bar_chart,
    dot_chart,
    histogram,
    line_chart,
    number,
    size,
)
from hf_trainweights.report.drawing import FONT_SIZE, Drawing, shortened, stack, style, text_width

DOCS = Path(__file__).parents[2] / "docs"
LONG = "model.language_model.layers.17.self_attn.a_projection_of_a_very_long_name.weight"
HOSTILE = '</text></svg><script>alert("x")</script>&\x00\x1b[31m\ud800'
FORMATS = [f"a format with a long name {index}" for index in range(8)]


@dataclass(frozen=True)
class Box:
    """Where a text lies."""

    text: str
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def boxes(element: ElementTree.Element, x: float = 0, y: float = 0) -> list[Box]:
    """Return where the texts of a drawing lie, as wide as the widest common font makes them."""
    found = []
    for child in element:
        if child.tag.endswith("}g"):
            dx, dy = map(float, re.findall(r"-?[\d.]+", child.attrib["transform"]))
            found += boxes(child, x + dx, y + dy)
        elif child.tag.endswith("}text"):
            text = child.text or ""
            large = "head" in child.attrib["class"]
            width = text_width(text) * (1.25 if large else 1)
            left = x + float(child.attrib["x"])
            left -= width * {"start": 0, "middle": 0.5, "end": 1}[child.attrib["text-anchor"]]
            base = y + float(child.attrib["y"])
            found.append(Box(text, left, base - 0.75 * FONT_SIZE, left + width, base + 0.2 * FONT_SIZE))
    return found


def assert_legible(svg: str) -> None:
    root = ElementTree.fromstring(svg)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    texts = boxes(root)
    assert texts
    assert [(a.text, b.text) for a, b in itertools.combinations(texts, 2) if a.overlaps(b)] == []
    outside = [box for box in texts if box.left < -1 or box.top < 0 or box.right > width + 1 or box.bottom > height]
    assert outside == []


def many_curves() -> list[Curve]:
    # All end within a pixel of each other.
    return [Curve(f"a curve with a long name {i}", tuple((x, 1 + 1e-4 * i * x) for x in range(9)), i) for i in range(8)]


CHARTS: dict[str, Callable[[], Drawing]] = {
    "bars": lambda: bar_chart(LONG, [Bar(LONG + str(i), (i, 3.0, 0.0), "12345.6 MB") for i in range(9)], "MB", FORMATS),
    "bars with a reference": lambda: bar_chart("Speed", [Bar("a", (2.0,), "2x", (1.5, 4.0))], "times", reference=1),
    "narrow bars": lambda: bar_chart("a", [Bar("int8", (896e3,), "896000 MB")], "megabytes on the disk", width=300),
    "frames": lambda: bar_chart("a", [Bar("x", (1.0,), "1 MB", framed=7.0)] * 3, "MB", ["p"], frame="q" * 40),
    "dots": lambda: dot_chart("Error", [Dots(LONG, ((21.5, "a"), (43.0, "b")), "21.5 dB")] * 3, "dB"),
    "one dot": lambda: dot_chart("Error", [Dots("layer", ((21.5, "a"),), "21.5 dB")], "dB"),
    "lines": lambda: line_chart(LONG, many_curves(), "step", "loss in nats"),
    "logarithmic lines": lambda: line_chart(
        "Loss", [Curve("a", ((0, 1e-9), (1, 1e9)), 0), Curve("b", ((0, 0.0),), 1)], "step", "loss", log=True
    ),
    "no points": lambda: line_chart("Loss", [Curve("a", ((0, math.nan),), 0)], "step", "loss"),
    "histogram": lambda: histogram("values", [1, 100, 3], -0.000123456, 123456.0, "value"),
    "hostile names": lambda: bar_chart(HOSTILE, [Bar(HOSTILE, (1.0, 2.0), "3 MB")], "MB", [HOSTILE, HOSTILE]),
    "several": lambda: stack("all", [[CHARTS["bars"](), CHARTS["lines"]()], [CHARTS["dots"]()]], "a caption " * 60),
}


@pytest.mark.parametrize("name", CHARTS)
def test_no_text_of_a_chart_covers_another_one_or_leaves_the_drawing(name: str) -> None:
    assert_legible(CHARTS[name]().standalone())


@pytest.mark.parametrize("name", ["at_a_glance", "checkpoint_curves", "run_plot", "speed"])
def test_no_text_of_the_documents_pictures_covers_another_one(name: str) -> None:
    assert_legible((DOCS / f"{name}.svg").read_text(encoding="utf-8"))


def test_hostile_names_stay_text() -> None:
    svg = CHARTS["hostile names"]().standalone()
    assert {child.tag.partition("}")[2] for child in ElementTree.fromstring(svg).iter()} <= {
        *("svg", "style", "title", "text", "rect", "line")
    }
    assert "\x00" not in svg


def test_bars_are_as_long_as_their_values() -> None:
    svg = bar_chart("a", [Bar("x", (1.0, 3.0), "4"), Bar("y", (2.0,), "2")], "MB", ["p", "q"]).standalone()
    root = ElementTree.fromstring(svg)
    bars = [each for each in root if each.tag.endswith("}rect") and float(each.attrib["height"]) > 11]
    first, second, third = (float(bar.attrib["width"]) for bar in bars)
    assert second == pytest.approx(3 * first, rel=1e-3)
    assert third == pytest.approx(2 * first, rel=1e-3)
    # The second part begins where the first one ends.
    assert float(bars[1].attrib["x"]) == pytest.approx(float(bars[0].attrib["x"]) + first, abs=0.1)


def test_a_frame_follows_the_bar_and_is_not_part_of_it() -> None:
    svg = bar_chart("a", [Bar("x", (1.0,), "1", framed=3.0)], "MB", ["p"], frame="q").standalone()
    bars = [each for each in ElementTree.fromstring(svg) if each.tag.endswith("}rect")]
    _, _, bar, frame = bars  # after those of the legend
    assert frame.attrib["class"] == "frame"
    assert float(frame.attrib["width"]) == pytest.approx(3 * float(bar.attrib["width"]), rel=1e-3)
    assert float(frame.attrib["x"]) == pytest.approx(float(bar.attrib["x"]) + float(bar.attrib["width"]), abs=0.1)


def test_a_dark_page_gets_lighter_colors() -> None:
    assert style().count("@media (prefers-color-scheme: dark)") == 1
    assert style() in CHARTS["dots"]().standalone().replace("&#34;", '"')


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        ([0, 97], {"zero": True}, [0, 20, 40, 60, 80]),
        ([0.2, 0.9], {"zero": True}, [0, 0.2, 0.4, 0.6, 0.8]),
        ([18.2, 42.6], {}, [20, 25, 30, 35, 40]),
        ([1.1, 30], {"log": True}, [2, 5, 10, 20]),
        ([7.0], {"zero": True}, [0, 2, 4, 6]),
    ],
)
def test_ticks_are_round_numbers(values: list[float], options: dict[str, bool], expected: list[float]) -> None:
    assert axis_of(values, 0, 100, **options).ticks() == pytest.approx(expected)


def test_equal_ratios_lie_equally_far_apart_on_a_logarithmic_axis() -> None:
    axis = axis_of([1, 100], 0, 100, log=True)
    assert [axis.place(value) for value in (1, 10, 100, 1e9)] == pytest.approx([0, 50, 100, 100])


def test_numbers_and_sizes_are_short() -> None:
    assert [number(value) for value in (0, 0.25, 1500, 1e7)] == ["0", "0.25", "1500", "1e+07"]
    assert [size(count) for count in (0, 999, 1000, 90.9e6, 2.5e9)] == ["0 B", "999 B", "1.0 kB", "90.9 MB", "2.5 GB"]
    assert shortened("abcdefgh", 8) == "abcdefgh"
    assert shortened("abcdefghi", 8) == "abc…fghi"
