"""Quick runs leave out what takes long, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import slow_tests
from slow_tests import mark_slow, slow_functions


def test_a_function_is_slow_if_its_cases_together_take_more_than_its_share() -> None:
    cases = [("test_fast", 0.9), *[(f"test_many[{number}]", 0.9) for number in range(2)], ("test_long[a-b]", 5000.0)]
    assert slow_functions(cases) == {"test_long": "none", "test_many": "first"}


def test_a_function_that_pays_for_a_fixture_in_a_quick_run_is_slow_too() -> None:
    whole = [("test_first_user", 4000.0), ("test_second_user", 0.1), ("test_many[0]", 0.6), ("test_many[1]", 0.6)]
    quick = [("test_second_user", 4000.0), ("test_many[0]", 0.6)]
    expected = {"test_first_user": "none", "test_many": "first", "test_second_user": "none"}
    assert slow_functions(whole, quick) == expected


class Item(SimpleNamespace):
    """Has what is read of a test."""

    def add_marker(self, marker: Any) -> None:
        self.markers.append(marker)


def test_the_first_case_of_many_short_ones_is_run(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_tests, "SLOW_TESTS", tmp_path / "slow.txt")
    (tmp_path / "slow.txt").write_text("test_long none\ntest_many first\n")
    names = ["test_fast", "test_long[1]", "test_many[1]", "test_many[2]"]
    items = [Item(name=name, path=file, markers=[]) for file in ("a.py", "b.py") for name in names]
    mark_slow(items)
    marked = [(item.path, item.name) for item in items if item.markers == [pytest.mark.slow]]
    assert marked == [(file, name) for file in ("a.py", "b.py") for name in ("test_long[1]", "test_many[2]")]
