"""What an override means, which are refused, and what stays in float."""

from __future__ import annotations

import pytest

from hf_trainweights.errors import ConfigError
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.models.choosing.config_values import check_overrides, format_of, left_out, listed


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


@pytest.mark.slow
@pytest.mark.parametrize("expression", ["a(", "(?P<n>a)(?P<n>b)", "(?i)a" * 2, "a{99999999999999999999}", "(" * 5000])
def test_an_expression_that_does_not_compile_is_refused_where_it_stands(expression: str) -> None:
    with pytest.raises(ConfigError, match=r"^overrides: expected a regular expression, found '"):
        check_overrides({"re:.*": "int8", f"re:{expression}": "int8"})


def test_a_pattern_that_is_valid_only_by_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="global flags not at the start"):
        listed(["(?i)head"], ["head"])


NAMES = ["model.layers.1.up_proj", "model.layers.1.up_proj.weight", "layers.11.q_proj", "layers.11.q_proj.weight"]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("up_proj", NAMES[:2]),
        ("layers.1", NAMES[:2]),
        ("re:.*proj", NAMES),
        (r"re:layers\.1", []),
        # These select nothing and mean what they meant to earlier versions, as saved models have them.
        ("up_proj.weight", NAMES[1:2]),
        ("_proj", [NAMES[0], NAMES[2]]),
        (r"layers\.\d+", NAMES[2:]),
        ("lm_head", []),
    ],
)
def test_an_entry_that_selects_nothing_is_read_as_earlier_versions_wrote_it(entry: str, expected: list[str]) -> None:
    assert left_out([entry], NAMES) == set(expected)
