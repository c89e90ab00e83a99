"""The words of the sources: few riddles in docstrings and comments, and names that say a role.

The limits are those that the model codebases of the field keep with room to spare. They show where to look; a sentence
that only avoids a word and stays a riddle is no better.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # parses all sources

ROOT = Path(__file__).parent.parent
PYTHON = sorted(path for folder in ("hf_trainweights", "hf_trainweights_cli") for path in (ROOT / folder).rglob("*.py"))
C = sorted(path for path in (ROOT / "hf_trainweights").rglob("*.[ch]"))

NAMELESS = {"each", "found", "given", "kept", "known", "part", "place"}
MOST_WHATS = 1.0  # in 1,000 words
MOST_OPENERS = 0.5  # in 1,000 words
MOST_NAMELESS = 1.0  # in 100 names

WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
WHAT = re.compile(r"\bwhat\b", re.IGNORECASE)
OPENER = re.compile(r"(?:^|(?<=[.!?]\s))(?:Of|With|Without|Where)\b")
C_COMMENT = re.compile(r"//\s?(.*)$", re.MULTILINE)
NO_PROSE = re.compile(r"#+\s*(noqa|type:|pyright|ruff|pragma)")


def prose(path: Path) -> Iterator[str]:
    """Yield the lines of all docstrings and comments of a source."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from C_COMMENT.findall(source)
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (line.strip() for line in (ast.get_docstring(node) or "").splitlines())
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not NO_PROSE.match(token.string):
            yield token.string.lstrip("# ")


def per_thousand(pattern: re.Pattern[str], lines: list[str]) -> float:
    words = sum(len(WORD.findall(line)) for line in lines)
    return 1000 * sum(len(pattern.findall(line)) for line in lines) / words


def assigned_names(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


@pytest.mark.parametrize("paths", [PYTHON, C], ids=["Python", "C"])
def test_sentences_name_what_they_speak_of(paths: list[Path]) -> None:
    lines = [line for path in paths for line in prose(path)]
    assert per_thousand(WHAT, lines) <= MOST_WHATS
    assert per_thousand(OPENER, lines) <= MOST_OPENERS


def test_names_say_a_role() -> None:
    names = [name for path in PYTHON for name in assigned_names(path)]
    nameless = [name for name in names if name.strip("_0123456789") in NAMELESS]
    assert 100 * len(nameless) / len(names) <= MOST_NAMELESS


def test_no_docstring_opens_by_returning_what() -> None:
    opening = re.compile(r"(Return|Say|Tell|Yield)s? what\b")
    assert [path.name for path in PYTHON for line in prose(path) if opening.match(line)] == []


def test_the_counters_see_riddles(tmp_path: Path) -> None:
    path = tmp_path / "riddle.py"
    path.write_text('def f():\n    """Return what is left."""\n    found = 1  # Of these, what?\n', encoding="utf-8")
    lines = list(prose(path))
    assert lines == ["Return what is left.", "Of these, what?"]
    assert per_thousand(WHAT, lines) == 1000 * 2 / 7
    assert per_thousand(OPENER, lines) == 1000 / 7
    assert list(assigned_names(path)) == ["found"]
