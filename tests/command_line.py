"""The `trainweights` command as tests call it: in this process, its output taken apart, or as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forks import exit_code_of, fork
from typer.testing import CliRunner

from hf_trainweights_cli.main import app, main


def run(*arguments: object, width: int = 80) -> Any:
    """Run the command; `width` is that of the boxes in which wrong usage is shown."""
    environment = {"COLUMNS": str(width)}
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment, catch_exceptions=False)


def run_json(*arguments: object, exit_code: int = 0) -> Any:
    """Run the command with `--json` and return what it prints, which must be JSON without NaN."""
    result = run(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout, parse_constant=pytest.fail)


def unwrapped(text: str) -> str:
    """Return what a box of usage errors says, without the box: where its lines break depends on the path in it."""
    return " ".join(text.replace("│", " ").split())


def fork_command(
    *arguments: object, stdin: int, stdout: int, stderr: int, prepare: Callable[[], object] = lambda: None
) -> int:
    """Run the command in a fork of this process, which has imported what a fresh interpreter imports for seconds.

    Args:
        arguments: Those of the command.
        stdin: A descriptor.
        stdout: A descriptor.
        stderr: A descriptor.
        prepare: What the process does first.

    Returns:
        Its process id.
    """

    def run_command() -> None:
        os.setsid()
        for target, source in enumerate((stdin, stdout, stderr)):
            os.dup2(source, target)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
        warnings.resetwarnings()
        warnings.simplefilter("ignore", DeprecationWarning)
        sys.argv = ["trainweights", *map(str, arguments)]
        prepare()
        main()

    return fork(run_command)


def run_without_terminal(directory: Path, *arguments: object) -> tuple[int, str, str]:
    """Run the command in a fork, its output in files; return its exit code and what it wrote to stdout and stderr."""
    out, errors = directory / "out", directory / "errors"
    with open(os.devnull) as nothing, out.open("wb") as stdout, errors.open("wb") as stderr:
        streams = {"stdin": nothing.fileno(), "stdout": stdout.fileno(), "stderr": stderr.fileno()}
        code = exit_code_of(fork_command(*arguments, **streams))
    return code, out.read_text(encoding="utf-8"), errors.read_text(encoding="utf-8")
