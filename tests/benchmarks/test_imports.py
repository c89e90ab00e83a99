"""Benchmarks find what they import from the package: most of them take minutes, so no test runs them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "benchmarks").rglob("*.py"))


def imports_of_the_package(source: str) -> list[str]:
    """Return the statements by which a file imports from the package; its other imports may need the bench extra."""
    nodes = [node for node in ast.walk(ast.parse((ROOT / source).read_text())) if isinstance(node, ast.ImportFrom)]
    return [ast.unparse(node) for node in nodes if (node.module or "").partition(".")[0] == "hf_trainweights"]


@pytest.mark.slow
def test_what_benchmarks_import_from_the_package_is_there() -> None:
    statements = {statement for source in SOURCES for statement in imports_of_the_package(source)}
    assert len(statements) > 10
    for statement in statements:
        exec(statement, {})
