"""`trainweights run`: a program that does not import this package loads quantized models, and stays as it was."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from command_line import run, unwrapped
from covering import exhaustive
from fresh_process import run_command

PROGRAM = """
import sys
from transformers import AutoModel
assert "hf_trainweights" in sys.modules, "nothing has imported the package"
import beside
model = AutoModel.from_pretrained(sys.argv[-1])
print(__name__, sys.argv[1:-1], sum(type(each).__name__ == "QuantizedTensor" for each in model.parameters()) > 0)
sys.exit(7)
"""


def run_by_torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone")
    command = [sys.executable, "-W", "ignore", *launcher, "-m", "hf_trainweights", "run", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow  # the program imports Transformers
@pytest.mark.parametrize(
    ("start", "exit_code"),
    # torchrun ends with 1 if any process fails.
    [(partial(run_command, "run"), 7), *exhaustive((run_by_torchrun, 1))],
    ids=["alone", "torchrun"],
)
def test_a_script_loads_a_quantized_model_with_its_own_arguments_and_ends_as_it_wants(
    start: Callable[..., subprocess.CompletedProcess[str]], exit_code: int, samples: Path, tmp_path: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "beside.py").touch()
    done = start(script, "--help", "-x", "1", samples / "llama-int8")
    assert done.stdout == "__main__ ['--help', '-x', '1'] True\n", done.stderr
    assert done.returncode == exit_code


def test_a_module_is_run_with_its_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    result = run("run", "json.tool", "--help")
    assert result.exit_code == 0
    assert "--sort-keys" in result.stdout


def test_a_module_of_the_working_directory_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program_of_mine").mkdir()
    (tmp_path / "program_of_mine" / "__main__.py").write_text("import sys; sys.exit(7)", encoding="utf-8")
    assert run("run", "program_of_mine").exit_code == 7


@pytest.mark.slow
def test_the_command_of_a_package_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])
    result = run("run", "transformers", "version")
    assert result.exit_code == 0
    assert result.stdout.strip().startswith("5.")


def test_a_name_that_is_no_program_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    result = run("run", "no_such_program", "--option", width=200)
    assert result.exit_code == 2
    assert "no such command, file or module in this environment: no_such_program" in unwrapped(result.stderr)


def test_an_interrupt_ends_the_program_without_a_word_about_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "program.py").write_text("raise KeyboardInterrupt", encoding="utf-8")
    result = run("run", tmp_path / "program.py")
    assert (result.exit_code, result.output) == (130, "")
