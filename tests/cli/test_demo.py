"""The `trainweights` command: options, exit codes, and what goes to stdout and stderr."""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_trainweights.demo import run as demo
from hf_trainweights.demo.measurement import Row
from hf_trainweights.demo.run import Result
from hf_trainweights.errors import ConfigError
from hf_trainweights.formats import FORMATS
from hf_trainweights_cli.main import app

RESULT = Result(
    model="/models/[mine]",
    held_out="Python 3.11.7 standard library",
    prompt="class A",
    losses=(6.0, 2.0),
    rows=(
        Row("bfloat16", 16_060_000_000, 16.0, 35.25, 1234.5, "(object):\n    [red]x" + "y" * 100, "", ()),
        Row("float8_e4m3", 8_500_000_000, 8.0625, 123456.789, 0.5, "", "quantized: 2", ("bin: other logits",)),
    ),
)


def run(*arguments: str, width: int = 80):
    return CliRunner().invoke(app, arguments, prog_name="trainweights", env={"COLUMNS": f"{width}"})


@pytest.fixture
def fixed_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run_demo", lambda *args, **kwargs: RESULT)


def test_module_runs_as_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["__main__.py", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_module("hf_trainweights", run_name="__main__")
    output = capsys.readouterr()
    assert "Usage: trainweights [OPTIONS] COMMAND" in output.out
    assert "demo" in output.out
    assert output.err == ""


def test_demo_prints_only_json_on_stdout_and_touches_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.setblocking(False)
        hub_environment = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}"}
        process = subprocess.run(
            [sys.executable, "-m", "hf_trainweights", "demo", "--json", "--steps", "2", "--format", "int8"],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | hub_environment | {"OMP_NUM_THREADS": "1"},
        )
        with pytest.raises(BlockingIOError, match="temporarily unavailable"):
            hub.accept()
    result = json.loads(process.stdout)
    assert [row["format"] for row in result["rows"]] == ["float32", "int8"]
    assert len(result["losses"]) == 2
    assert result["failures"] == []
    assert "training" in process.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--format", "int3"), f"int3 is none of {', '.join(FORMATS)}."),
        (("--model", "x", "--steps", "3"), "leave out"),
        (("--steps", "0"), "--steps"),
        (("--nonsense",), "--nonsense"),
    ],
)
def test_bad_option_exits_with_2_and_says_which(arguments: tuple[str, ...], message: str) -> None:
    result = run("demo", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_error_is_one_line_with_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    result = run("demo", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: --out: expected a new or empty directory")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="new or empty directory"):
        CliRunner().invoke(app, ["demo", "--debug", "--out", str(tmp_path)], catch_exceptions=False)


@pytest.mark.usefixtures("fixed_result")
def test_failed_check_exits_with_1_and_says_which() -> None:
    result = run("demo")
    assert result.exit_code == 1
    assert result.stderr == "FAILED float8_e4m3: bin: other logits\n"


@pytest.mark.usefixtures("fixed_result")
def test_failed_check_is_in_the_json() -> None:
    result = run("demo", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["failures"] == ["float8_e4m3: bin: other logits"]


@pytest.mark.usefixtures("fixed_result")
def test_table_fits_80_columns() -> None:
    lines = run("demo").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    cells = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in lines if line.startswith("│")}
    assert [cell.strip() for cell in cells["bfloat16"]] == ["16.1 GB", "16.00", "35.250", "1234.5", "bit-equal"]
    assert [cell.strip() for cell in cells["float8_e4m3"]] == ["8.5 GB", "8.06", "123456.789", "0.5", "FAILED"]
    assert lines[1].strip() == "/models/[mine]"
    assert "loss 6.00 to 4.00" in lines[0]
    assert any(line.startswith(r"bfloat16     '(object):\n    [red]xyyy") for line in lines)
