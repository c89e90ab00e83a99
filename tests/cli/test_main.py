"""The `trainweights` command as a process: its help is quick, and it is there under each of its names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from command_line import run_without_terminal
from typer.testing import CliRunner

from hf_trainweights_cli.main import app, main

pytestmark = pytest.mark.slow  # most start an interpreter

COMMANDS = (
    *("quantize", "dequantize", "inspect", "verify", "diff", "export", "push", "report", "demo", "import"),
    *("run", "checkpoint"),
)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300, check=False)


HELP = """
import json, sys
from typer.testing import CliRunner
from hf_trainweights_cli.main import app

for command in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, [*command, "--help"])
    slow = sorted({"torch", "transformers", "hf_trainweights"} & sys.modules.keys())
    print(json.dumps([command, result.exit_code, slow, result.stdout]))
"""


def test_help_is_shown_without_importing_what_is_slow_to_import() -> None:
    commands = [[], *([name] for name in COMMANDS), ["checkpoint", "compress"]]
    done = run("-c", HELP, json.dumps(commands))
    assert (done.returncode, done.stderr) == (0, "")
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(command, code, slow) for command, code, slow, _ in told] == [(command, 0, []) for command in commands]
    assert all(f"Usage: {' '.join(('root', *command))} [OPTIONS]" in text for command, _, _, text in told)
    assert all(f"│ {name} " in told[0][3] for name in COMMANDS)


@pytest.mark.parametrize("command", [(), ("quantize",), ("checkpoint",), ("checkpoint", "compress")])
def test_the_short_option_shows_the_same_help_and_flags_have_no_type(command: tuple[str, ...]) -> None:
    long, short = (CliRunner().invoke(app, [*command, option]).stdout for option in ("--help", "-h"))
    assert short == long
    assert "<bool>" not in long


def test_the_version_is_that_of_the_package() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"trainweights {version('hf_trainweights')}\n")


def test_a_shell_completes_commands_without_importing_what_is_slow_to_import() -> None:
    asked = {"_TRAINWEIGHTS_COMPLETE": "complete_bash", "COMP_WORDS": "trainweights de", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "from hf_trainweights_cli.main import main; main()"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **asked},
    )
    assert sorted(done.stdout.split()) == ["demo", "dequantize"]
    assert "| torch\n" not in done.stderr


def test_the_installed_script_is_main() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"] == {"trainweights": f"{main.__module__}:{main.__name__}"}


def test_no_command_is_wrong_usage_and_shows_the_help() -> None:
    done = run("-c", "from hf_trainweights_cli.main import main; main()")
    assert done.returncode == 2
    assert "Usage: trainweights [OPTIONS] COMMAND" in done.stdout + done.stderr


def test_an_error_of_a_process_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, out, said = run_without_terminal(tmp_path, "verify", tmp_path / "empty")
    assert (code, out) == (1, "")
    assert said.startswith(f"error: {tmp_path / 'empty'}: expected a directory with trainweights_files.json")
    assert said.count("\n") == 1


@pytest.mark.parametrize(("command", "policy"), [("inspect", "PASSIVE"), ("run", None)])
def test_threads_of_a_command_wait_without_spinning_and_those_of_a_program_as_they_like(
    command: str, policy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    CliRunner().invoke(app, [command, "no_such_thing"])
    assert os.environ.pop("OMP_WAIT_POLICY", None) == policy
