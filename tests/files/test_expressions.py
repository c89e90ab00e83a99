"""Expressions that come out of a file mean what they mean to `re`, and whatever they are, they end."""

from __future__ import annotations

import io
import json
import re
import resource
import subprocess
import sys
import time

import pytest
from covering import by_default

from hf_trainweights.errors import ConfigError, UnsupportedError
from hf_trainweights.files import expression_worker, selectors
from hf_trainweights.files.selectors import matching

NAMES = [
    *(
        "lm_head",
        "model.layers.0.self_attn.q_proj",
        "model.layers.11.mlp.down_proj.weight",
        "",
        "a",
        "ab\nc",
        "Änderung",
    ),
    "model.layers.0.self_attn.q_proj.weight",
]
ORDINARY = [
    *(".*", ".*down_proj", "lm_head", "model.layers.*", r"model\.layers\.\d+\..*", r".*\.(q|k|v)_proj", "(?i:.*MLP.*)"),
    *(r"(?!lm).*", r"(?P<x>a)b?(?s:.*)", "[^.]*", r"\w+", "", "a|lm_head", r".*\.weight", "(?:[a-z_]+[.]?)+", "Ä.*"),
    *(r"a{1,2}", ".*layers.0.*", r"(.).*\1", "ab.c", r"ab\nc", ".*.*", "a-b"),
]
# Years of matching or compiling for one engine or another, or gigabytes.
HOSTILE = {
    "nested repetition": r"(([a-z_.0-9]+)+)+[!?]",
    "alternatives that overlap": r"(?:\w|\.|[a-z]|.)*[!?]",
    "lazy repetition": r"(?:(?:(?:.*?)*?)*?)*?[!?]",
    "deep repetition": "(" * 90 + ".?" + ")+" * 90 + "[!?]",
    "many repetitions": "(((((((.?){999})?){999})?){999})?)[!?]",
    "a large table": "[\\x00-\\U0010ffff]|" * 2000,
}


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["", r"(?:(?<=\.)|(?=\.|$))(?s:.*)"])
@pytest.mark.parametrize("expression", ORDINARY)
def test_an_ordinary_expression_matches_what_re_matches(expression: str, ending: str) -> None:
    whole = re.compile(f"(?:{expression}){ending}" if ending else expression)
    assert matching([expression], NAMES, ending) == {expression: {name for name in NAMES if whole.fullmatch(name)}}


def test_several_expressions_are_answered_each_for_itself() -> None:
    matches = matching(["(a)", "(lm_head)", "(a)", ".*q_proj"], NAMES)
    assert matches == {"(a)": {"a"}, "(lm_head)": {"lm_head"}, ".*q_proj": {"model.layers.0.self_attn.q_proj"}}
    assert matching([], NAMES) == {}
    assert matching(["(a)"], []) == {"(a)": frozenset()}


@pytest.mark.slow
@pytest.mark.parametrize("name", by_default(("nested repetition", "many repetitions"), HOSTILE))
def test_a_hostile_expression_ends_in_time_by_an_error_that_names_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selectors, "_MAX_SECONDS", 1.0)
    began = time.monotonic()
    with pytest.raises(ConfigError, match="that 8 names are matched with in 1 seconds and 512 MiB") as raised:
        matching(["(?:a)", HOSTILE[name], "b.*"], NAMES)
    assert repr(HOSTILE[name])[:100] in raised.value.found
    assert time.monotonic() - began < 1.0 + 5


@pytest.mark.slow
def test_all_expressions_together_have_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selectors, "_MAX_SECONDS", 1.0)
    slow = [f".*.*.*.*.*[!{number}]" for number in range(5000)]
    assert matching(slow[:1], NAMES)
    with pytest.raises(ConfigError, match="names are matched with in 1 seconds"):
        matching(slow, NAMES)


@pytest.mark.slow
def test_more_names_than_can_be_tried_by_all_expressions_do_not_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selectors, "_MAX_SECONDS", 1.0)
    with pytest.raises(ConfigError, match="seconds and 512 MiB"):
        matching([f".*a{number}" for number in range(100_000)], [f"name.{number}" for number in range(1000)])


def test_plain_names_and_the_commonest_expressions_need_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "not here")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert matching([".*a.b-c", r"lm\.head.*"], ["xa.b-c", "lm.head"]) == {
        ".*a.b-c": {"xa.b-c"},
        r"lm\.head.*": {"lm.head"},
    }
    with pytest.raises(UnsupportedError, match=r"found .*not here.* Write full names instead of regular expressions\."):
        matching(["(refused)"], ["a"])


def test_the_process_answers_each_expression_in_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)  # it would hold for this process
    request = json.dumps({"expressions": ["a.", "(", "b"], "names": ["ab", "b", "ac"]})
    monkeypatch.setattr(sys, "stdin", io.StringIO(request))
    expression_worker.main()
    first, second, third = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"matched": [0, 2]}
    assert "unterminated" in second["invalid"]
    assert third == {"matched": [1]}
