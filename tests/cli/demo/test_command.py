"""The `trainweights` command: options, exit codes, and what goes to stdout and stderr."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
import socket
import sys
from pathlib import Path

import pytest
from fresh_process import run_command
from typer.testing import CliRunner

from hf_trainweights.errors import ConfigError
from hf_trainweights.formats import FORMATS
from hf_trainweights.report.runs import SavedCheckpoint
from hf_trainweights_cli.demo import run as demo
from hf_trainweights_cli.demo.checkpoints import Checkpoints
from hf_trainweights_cli.demo.measurement import Row
from hf_trainweights_cli.demo.run import Result
from hf_trainweights_cli.demo.speed import Speed
from hf_trainweights_cli.main import app

FIRST_LINE = "Importing PyTorch and Transformers ...\n"
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


@pytest.mark.slow
def test_module_runs_as_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["__main__.py", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_module("hf_trainweights", run_name="__main__")
    output = capsys.readouterr()
    assert "Usage: trainweights [OPTIONS] COMMAND" in output.out
    assert "demo" in output.out
    assert output.err == ""


@pytest.mark.exhaustive
def test_demo_prints_only_json_on_stdout_and_touches_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.setblocking(False)
        hub_environment = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}"}
        process = run_command("demo", "--json", "--steps", "2", "--format", "int8", environment=hub_environment)
        with pytest.raises(BlockingIOError, match="temporarily unavailable"):
            hub.accept()
    result = json.loads(process.stdout)
    assert [row["format"] for row in result["rows"]] == ["float32", "int8"]
    assert len(result["losses"]) == 2
    assert result["failures"] == []
    assert "training" in process.stderr
    assert process.stderr.startswith(FIRST_LINE)
    assert [row["format"] for row in result["speeds"]][1:] == ["int8"]
    assert result["checkpoints"]["resumed_at"] == 1
    assert process.stderr.count("int4 weights") <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--format", "int3"), "int3 is none of int8, int4"),
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
    assert result.stderr.startswith(f"{FIRST_LINE}error: --out: expected a new or empty directory")
    assert result.stderr.count("\n") == 2
    assert result.stdout == ""


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="new or empty directory"):
        CliRunner().invoke(app, ["demo", "--debug", "--out", str(tmp_path)], catch_exceptions=False)


@pytest.mark.slow
def test_without_format_the_usual_ones_are_measured_and_the_help_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[list[str]] = []
    monkeypatch.setattr(demo, "run_demo", lambda out, formats, *args, **kwargs: measured.append(formats) or RESULT)
    run("demo")
    run("demo", "--format", "uint3", "--format", "int8", "--format", "uint3")
    assert measured == [list(demo.USUAL_FORMATS), ["uint3", "int8"]]
    words = re.findall(r"\w+", run("demo", "--help").stdout)
    assert set(demo.USUAL_FORMATS) <= set(words) & set(FORMATS)


@pytest.mark.usefixtures("fixed_result")
def test_failed_check_exits_with_1_and_says_which() -> None:
    result = run("demo")
    assert result.exit_code == 1
    assert result.stderr == f"{FIRST_LINE}FAILED float8_e4m3: bin: other logits\n"


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


def test_results_of_a_training_are_shown_in_80_columns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved = tuple(SavedCheckpoint(step, "near-lossless", (1, 2, 3, 4), 0, 140, None) for step in (10, 20, 30))
    checkpoints = Checkpoints("near-lossless", saved, 20, (3.01, 2.99), 0.01)
    speeds = (Speed("bfloat16", 200_000_000, 0.04, 0.04), Speed("int8", 105_000_000, 0.02, 0.04, 1.9, 2.0))
    machine = "A processor of a very long name @ 2.50GHz, 2 cores"
    losses = tuple(3.0 for _ in range(30))
    result = dataclasses.replace(RESULT, losses=losses, machine=machine, speeds=speeds, checkpoints=checkpoints)
    monkeypatch.setattr(demo, "run_demo", lambda *args, **kwargs: result)
    done = run("demo", "--html", str(tmp_path / "demo.html"))
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert re.search(r"int8 .*105\.0 MB .*1\.90 .*20\.00 .*40\.00 .*2\.00", done.stdout)
    assert "3 near-lossless checkpoints: 420 bytes -> 30 bytes, 14.00x smaller" in done.stdout
    assert "Resumed from step 20, 2 steps later: loss 2.9900, without the break 3.0000" in done.stdout
    assert "tokens/s" not in done.stdout
    assert machine in " ".join(done.stdout.split())
    assert "<svg" in (tmp_path / "demo.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("fixed_result")
def test_pictures_do_not_replace_a_file_of_another_kind(tmp_path: Path) -> None:
    result = run("demo", "--html", str(tmp_path / "model.safetensors"))
    assert result.exit_code == 1
    assert "expected a file name that ends in .html" in result.stderr
