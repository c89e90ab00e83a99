"""The choice within a budget: never above it, and no other choice of as many bytes loses less."""

from __future__ import annotations

import itertools
import random

import pytest

from hf_trainweights.formats.int8 import Int8
from hf_trainweights.models.budget.allocation import Option, choose_options, smallest_bytes


def some_options(seed: int, weights: int, formats: int) -> dict[str, list[Option]]:
    """Return options as formats have them: each larger one loses less, on average a quarter for two bits more."""
    generator = random.Random(seed)
    options = {}
    for number in range(weights):
        elements, importance = generator.choice([100, 400, 1600]), generator.lognormvariate(0, 1)
        bits = sorted(generator.uniform(2, 8) for _ in range(formats))
        losses = [importance * 4.0**-each * generator.uniform(0.8, 1.25) for each in bits]
        pairs = zip(bits, losses, strict=True)
        options[f"w{number}"] = [Option(Int8(), int(elements * each / 8), loss) for each, loss in pairs]
    return options


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_within_the_budget_and_near_the_best_there_is(seed: int) -> None:
    options = some_options(seed, weights=5, formats=4)
    least = smallest_bytes(options)
    limit = least + random.Random(seed).randrange(2000)
    chosen = choose_options(options, limit)
    assert sum(each.stored_bytes for each in chosen.values()) <= limit
    every = itertools.product(*options.values())
    best = min(sum(each.loss for each in one) for one in every if sum(each.stored_bytes for each in one) <= limit)
    # With five weights one that does not fit is much; the bound falls with their number.
    assert sum(each.loss for each in chosen.values()) <= 1.5 * best


def test_nothing_that_would_lose_less_fits_into_what_is_left() -> None:
    options = some_options(0, weights=60, formats=6)
    limit = 2 * smallest_bytes(options)
    chosen = choose_options(options, limit)
    left = limit - sum(each.stored_bytes for each in chosen.values())
    assert 0 <= left < 0.01 * limit
    for name, choices in options.items():
        for choice in choices:
            assert choice.loss >= chosen[name].loss or choice.stored_bytes - chosen[name].stored_bytes > left


def test_among_many_weights_the_choice_is_as_good_as_a_price_of_bytes_makes_it() -> None:
    options = some_options(1, weights=60, formats=6)
    limit = 2 * smallest_bytes(options)
    lost = sum(each.loss for each in choose_options(options, limit).values())
    # For any price the sum of loss and price is a lower bound of what any choice of `limit` bytes can lose.
    prices = [10.0**exponent for exponent in (-7, -6.5, -6, -5.5, -5, -4.5, -4, -3.5, -3)]
    bounds = [
        sum(min(choice.loss + price * choice.stored_bytes for choice in choices) for choices in options.values())
        - price * limit
        for price in prices
    ]
    assert max(bounds) <= lost <= 1.3 * max(bounds)


def test_of_equal_weights_the_first_gets_more() -> None:
    small, large = Option(Int8(), 10, 1.0), Option(Int8(), 20, 0.1)
    options = {name: [small, large] for name in ("b", "a", "c")}
    assert [each.stored_bytes for each in choose_options(options, 40).values()] == [20, 10, 10]
