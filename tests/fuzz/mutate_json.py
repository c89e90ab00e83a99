"""Mutations of JSON values: other types, edges of ranges, missing, doubled and exchanged parts."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

_INTEGERS = [
    -1,
    0,
    1,
    2,
    3,
    17,
    255,
    *(1 << bits for bits in (31, 32, 40, 61, 62, 63, 64, 70)),
    (1 << 31) - 1,
    -(1 << 63),
]
_FLOATS = [0.0, -1.0, 0.5, 1e300, 5e-324, float("nan"), float("inf")]
_TEXTS = ["x", "", "nan", "../x", "/etc/passwd", "a/b", "\ud800", "\0", "\x1b[31m", "[red]", "a\nb", "a" * 3000]
_CONTAINERS = [[], {}, [0], [1, 1], [1 << 31, 0], [[]], {"x": 1}, {"": None}]
JUNK: list[Any] = [None, True, False, *_INTEGERS, *_FLOATS, *_TEXTS, *_CONTAINERS]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield container and key of every value in a JSON value, but of the value itself."""
    open_containers = [value]
    for container in open_containers:
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in keys:
            yield container, key
            if isinstance(container[key], dict | list) and container[key]:
                open_containers.append(container[key])


def change_json(rng: random.Random, value: Any, extra_keys: Sequence[str] = (), junk: Sequence[Any] = ()) -> Any:
    """Change a JSON container in place, at one to three places, and return it.

    Args:
        rng: Decides where and how.
        value: A dict or list.
        extra_keys: Keys that mean something to the reader and may be added.
        junk: Values that mean something to the reader, beside `JUNK`.
    """
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        found = list(places(value))
        if not found:
            break
        container, key = rng.choice(found)
        change = rng.randrange(8)
        if change == 0:
            container[key] = copy.deepcopy(rng.choice(JUNK))
        elif change == 1 and junk:
            container[key] = copy.deepcopy(rng.choice(junk))
        elif change == 2:
            del container[key]
        elif change == 3:
            other, other_key = rng.choice(found)
            container[key] = copy.deepcopy(other[other_key])
        elif change == 4 and isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        elif change == 5 and isinstance(container, dict):
            container[rng.choice((*extra_keys, *_TEXTS))] = copy.deepcopy(rng.choice((*JUNK, *junk)))
        elif change == 6 and isinstance(container, dict):
            container[rng.choice((*extra_keys, *_TEXTS))] = container.pop(key)
        else:
            container[key] = _near(rng, container[key])
    return value


def _near(rng: random.Random, value: Any) -> Any:
    """Return a value of the same type that differs a little."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, value * 2, -value, value // 2, value << rng.randrange(40)))
    if isinstance(value, float):
        return value * rng.choice((2, -1, 0.5, 1e10, 1e-10, 0))
    if isinstance(value, str):
        return rng.choice((value[::-1], value + "a", value[:-1], value.upper()))
    if isinstance(value, list):
        return rng.sample(value, len(value))
    return value
