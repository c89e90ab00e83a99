"""The tool itself: it makes the faults that it should, and tells a fault that a test finds from one that none finds."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from covering import exhaustive
from mutants.faults import faults
from mutants.trial import IMPORT, Chosen, Line, Reach, function_of, run

TINY = '''
"""Numbers."""

def first_above(limit: int, numbers: list[int]) -> int:
    """Return the first number above a limit."""
    at = 0
    while at < len(numbers) and not numbers[at] > limit:
        at += 1
    if at == len(numbers):
        raise ValueError(f"no number above {limit + 0}")
    return numbers[at]

COUNT = len([5, 7])
LARGEST = max(5, 7)
'''
TESTS = """
import subprocess, sys
import pytest, tiny

@pytest.mark.parametrize("limit", [4, 6])
def test_above(limit):
    assert tiny.first_above(limit, [5, 7]) == limit + 1

def test_none():
    with pytest.raises(ValueError, match="no number above 7"):
        tiny.first_above(7, [5, 7])

def test_elsewhere():
    program = "import tiny; print(tiny.LARGEST)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "7\\n"

def test_broken():
    assert tiny.COUNT == 0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.py").write_text(TINY, encoding="utf-8")
    (tmp_path / "test_tiny.py").write_text(TESTS, encoding="utf-8")
    return tmp_path


def test_faults_are_small_changes_of_what_a_module_does() -> None:
    changes = [fault.lines(TINY)[1] for fault in faults(TINY)]
    assert sorted(changes) == sorted(
        [
            "at = 1",
            "while not (at < len(numbers) and not numbers[at] > limit):",
            "while at < len(numbers) or not numbers[at] > limit:",
            "while at <= len(numbers) and not numbers[at] > limit:",
            "while at < len(numbers) and (numbers[at] > limit):",
            "while at < len(numbers) and not numbers[at] >= limit:",
            "pass",
            "at += 2",
            "if at != len(numbers):",
            "pass",
            "return None",
            "COUNT = len([6, 7])",
            "COUNT = len([5, 8])",
            "LARGEST = max(6, 7)",
            "LARGEST = max(5, 8)",
            "LARGEST = min(5, 7)",
        ]
    )
    assert len({ast.dump(ast.parse(fault.apply(TINY))) for fault in faults(TINY)}) == len(changes)
    assert {fault.function for fault in faults(TINY)} == {"first_above", ""}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "found_by", "code"),
    [
        ("len([5, 8])", None, 0),  # nobody looks at the numbers
        ("if at != len(numbers):", "test_tiny.py::test_above[4]", 1),
        ("numbers[at] >= limit", "test_tiny.py::test_none", 1),
        # It never counts on: killed by SIGXCPU.
        *exhaustive(("    pass\n    if", "test_tiny.py::test_above[6]", -24)),
        ("return None", "test_tiny.py::test_above[4]", 1),
        ("min(5, 7)", "test_tiny.py::test_elsewhere", 1),
        ("len([5, 7][", IMPORT, 2),
    ],
)
def test_a_fault_is_found_by_the_test_in_which_the_run_ends(
    folder: Path, change: str, found_by: str | None, code: int
) -> None:
    made = [fault.apply(TINY) for fault in faults(TINY)]
    source = next((source for source in made if change in source), TINY.replace("len([5, 7]", change))
    running = folder / "running"
    running.write_text(IMPORT, encoding="utf-8")
    plugin = Chosen(["test_tiny.py::test_above[4]"], {"test_tiny.py::test_broken"}, running, seconds=1)
    assert run(["-x", "test_tiny.py"], plugin, folder, folder / "log", ("tiny", source)) == code
    assert found_by is None or running.read_text(encoding="utf-8") == found_by
    assert (folder / "tiny.py").read_text(encoding="utf-8") == TINY


@pytest.mark.slow
def test_a_run_without_a_fault_says_which_tests_run_a_line(folder: Path) -> None:
    (folder / "conftest.py").write_text("import tiny", encoding="utf-8")  # before the tests are collected
    path = str(folder / "tiny.py")
    kept = folder / "reached"

    def write(failed: set[str], seconds: dict[str, float], tests: dict[Line, set[str]]) -> None:
        named = {line: sorted(map(function_of, ran)) for (_, line), ran in tests.items()}
        kept.write_text(repr((failed, seconds.keys() >= failed, named)), encoding="utf-8")

    lines = [(path, 1 + TINY[: TINY.index(text)].count("\n")) for text in ("raise", "return numbers", "COUNT")]
    assert run(["test_tiny.py"], Reach(lines, write), folder, folder / "log") == 1
    failed, is_timed, tests = eval(kept.read_text(encoding="utf-8"), {"dict_keys": set})
    above, none = "test_tiny.py::test_above", "test_tiny.py::test_none"
    assert failed == {"test_tiny.py::test_broken"}
    assert is_timed
    assert list(tests.values()) == [[none], [above, above], [IMPORT]]
