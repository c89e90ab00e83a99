"""Which cases of a product of parameters stand for the whole of it: a covering array, as tests of combinations use it.

A defect seldom needs more than two parameters to have certain values. So the default run takes, of a function marked
`covering(2)`, as few cases as hold each pair of values that any of its cases holds; `make exhaustive` takes them all.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest


def covering(cases: Sequence[Sequence[Hashable]], strength: int) -> list[int]:
    """Return the numbers of the cases to take, in order: together they hold each combination of `strength` values.

    The same cases always give the same numbers, so that all processes of a run agree.
    """
    strength = min(strength, len(cases[0]))
    combinations_of = [set(combinations(enumerate(case), strength)) for case in cases]
    uncovered = set().union(*combinations_of)
    taken: set[int] = set()
    # Nearly the greedy choice, which takes the case that adds the most, in a few passes instead of one for each case.
    for least in range(len(combinations_of[0]), 0, -1):
        for number, held in enumerate(combinations_of):
            if len(held & uncovered) >= least:
                taken.add(number)
                uncovered -= held
    return sorted(taken)


def exhaustive(*cases: object) -> list[Any]:
    """Return cases for `parametrize` that run in `make exhaustive` alone: of each its values, or its only value."""
    values_of = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*values, marks=pytest.mark.exhaustive) for values in values_of]


def by_default(taken: Collection[Hashable], values: Iterable[Hashable]) -> list[Any]:
    """Return the values for `parametrize`, of which the default run takes those in `taken` alone."""
    return [each for value in values for each in ([value] if value in taken else exhaustive(value))]
