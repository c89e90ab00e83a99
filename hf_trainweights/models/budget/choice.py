"""The choice of a format for each weight, by which a model loses least within so many bytes.

For a price of a byte, each weight takes the format with the smallest sum of loss and price; the price at which the
bytes are spent gives the best choice there is (Shoham and Gersho, 1988). As the price falls, a weight goes along the
lower convex hull of its options, so all that is needed is these steps, in the order of what they gain per byte.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hf_trainweights.formats.base import Format


@dataclass(frozen=True)
class Option:
    """A format that a weight may have, and what the model loses by it, in any unit that adds up."""

    format: Format
    stored_bytes: int
    loss: float


def smallest_bytes(options: Mapping[str, Sequence[Option]]) -> int:
    """Return the fewest bytes that weights can take."""
    return sum(min(each.stored_bytes for each in choices) for choices in options.values())


def choose_options(options: Mapping[str, Sequence[Option]], limit_bytes: int) -> dict[str, Option]:
    """Return an option for each weight: those of least loss whose bytes add up to a limit at most.

    The limit is at least `smallest_bytes(options)`. Ties go to the weight that comes first.
    """
    hulls = {name: _hull(choices) for name, choices in options.items()}
    chosen = {name: hull[0] for name, hull in hulls.items()}
    left = limit_bytes - sum(each.stored_bytes for each in chosen.values())
    steps = [(_gain_per_byte(a, b), name, b) for name, hull in hulls.items() for a, b in itertools.pairwise(hull)]
    stopped: set[str] = set()
    # Python's sort is stable, and along a hull the gain falls, so the steps of a weight stay in order.
    for _, name, option in sorted(steps, key=lambda step: -step[0]):
        added = option.stored_bytes - chosen[name].stored_bytes
        if name in stopped or added > left:
            stopped.add(name)
            continue
        chosen[name], left = option, left - added
    return _spend_rest(options, chosen, left)


def _spend_rest(options: Mapping[str, Sequence[Option]], chosen: dict[str, Option], left: int) -> dict[str, Option]:
    """Return the choice with what is left spent: on options off the hull too, the largest gain first."""
    while better := list(_affordable(options, chosen, left)):
        name, option = max(better, key=lambda each: chosen[each[0]].loss - each[1].loss)
        left -= option.stored_bytes - chosen[name].stored_bytes
        chosen[name] = option
    return chosen


def _affordable(
    options: Mapping[str, Sequence[Option]], chosen: Mapping[str, Option], left: int
) -> Iterator[tuple[str, Option]]:
    for name, choices in options.items():
        now = chosen[name]
        yield from (
            (name, each) for each in choices if each.loss < now.loss and each.stored_bytes - now.stored_bytes <= left
        )


def _hull(choices: Sequence[Option]) -> list[Option]:
    """Return the options on the lower convex hull of loss over bytes, from the smallest to the most exact."""
    hull: list[Option] = []
    for option in sorted(choices, key=lambda each: (each.stored_bytes, each.loss)):
        if hull and option.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _gain_per_byte(hull[-2], hull[-1]) <= _gain_per_byte(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _gain_per_byte(smaller: Option, larger: Option) -> float:
    # Two options of equal size are never both on a hull.
    return (smaller.loss - larger.loss) / (larger.stored_bytes - smaller.stored_bytes)
