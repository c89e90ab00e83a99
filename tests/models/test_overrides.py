"""Which override decides for a weight, and which overrides are refused."""

from __future__ import annotations

import pytest

from hf_trainweights.errors import ConfigError
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.models.overrides import Override, check_overrides, find_override, format_of, listed, select


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("a.b", True),
        ("a", False),
        ("b", False),
        ("a.b.weight", True),
        ("re:a.*", True),
        ("re:a", False),
        ("re:.*weight", True),
        ("re:axb", False),
        ("", False),
    ],
)
def test_a_selector_is_a_whole_name_or_an_expression_for_one(selector: str, expected: bool) -> None:
    assert bool(select([selector], ["a.b", "a.b.weight"])[selector]) == expected


def winner(overrides: dict[str, Override], names: list[str]) -> str | None:
    return find_override(select(overrides, names), names)


def test_an_exact_name_wins_and_the_first_name_wins_among_these() -> None:
    overrides = {"re:.*": None, "a.weight": "int8", "a": "int4"}
    assert winner(overrides, ["a", "a.weight"]) == "a"
    assert winner(overrides, ["a.weight", "a"]) == "a.weight"
    assert winner(overrides, ["b"]) == "re:.*"
    assert winner({"a": "int8"}, ["b"]) is None


def test_the_module_without_a_name_can_be_overridden() -> None:
    assert winner({"": "int8", "re:weight": "int4"}, ["", "weight"]) == ""


def test_an_override_is_a_name_a_dict_or_none() -> None:
    assert format_of("int8") == Int8()
    assert format_of({"format": "int4", "group_size": 32}) == Int4(32)
    assert format_of(None) is None


def test_checked_overrides_share_nothing_with_what_the_user_passed() -> None:
    given = {"a": {"format": "int4", "group_size": 32}}
    checked = check_overrides(given)
    assert checked == given
    given["a"]["group_size"] = 64
    assert checked == {"a": {"format": "int4", "group_size": 32}}
    assert check_overrides(None) == {}


@pytest.mark.parametrize("expression", ["a(", "(?P<n>a)(?P<n>b)", "(?i)a" * 2, "a{99999999999999999999}", "(" * 5000])
def test_an_expression_that_does_not_compile_is_refused_where_it_stands(expression: str) -> None:
    with pytest.raises(ConfigError, match=r"^overrides: expected a regular expression, found '"):
        check_overrides({"re:.*": "int8", f"re:{expression}": "int8"})


def test_a_pattern_that_is_valid_only_by_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="global flags not at the start"):
        listed(["(?i)head"], ["head"])
