"""What the worker answers; that it cannot hurt the process that started it is tested with expressions.py."""

from __future__ import annotations

import io
import json
import resource

import pytest

from hf_trainweights.files import expression_worker


def answers(expressions: list[str], names: list[str], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({"expressions": expressions, "names": names})))
    said = io.StringIO()
    monkeypatch.setattr("sys.stdout", said)
    expression_worker.main()
    return [json.loads(line) for line in said.getvalue().splitlines()]


def test_places_of_names_that_match_as_a_whole_are_answered_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = answers(["a+", "b", ".*"], ["aa", "ab", "b"], monkeypatch)
    assert replies == [{"matched": [0]}, {"matched": [2]}, {"matched": [0, 1, 2]}]


def test_what_is_no_expression_is_said_and_the_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = answers(["(", "a"], ["a"], monkeypatch)
    assert first.keys() == {"invalid"}
    assert second == {"matched": [0]}
