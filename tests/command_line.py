"""The `trainweights` command as tests call it: in this process, its output taken apart."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_trainweights_cli.main import app


def run(*arguments: object, width: int = 80) -> Any:
    """Run the command; `width` is that of the boxes in which wrong usage is shown."""
    environment = {"COLUMNS": str(width)}
    return CliRunner().invoke(app, [str(each) for each in arguments], env=environment, catch_exceptions=False)


def run_json(*arguments: object, exit_code: int = 0) -> Any:
    """Run the command with `--json` and return what it prints, which must be JSON without NaN."""
    result = run(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout, parse_constant=pytest.fail)


def unwrapped(text: str) -> str:
    """Return what a box of usage errors says, without the box: where its lines break depends on the path in it."""
    return " ".join(text.replace("│", " ").split())
