"""`trainweights run`: a program that does not import this package loads quantized models, and stays as it was."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import pytest
import typer
from command_line import run, unwrapped
from covering import by_default, exhaustive
from fresh_process import run_command

from hf_trainweights.errors import UnsupportedError
from hf_trainweights_cli.main import main

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


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that runs a program in this process, as `trainweights run` with its arguments would."""
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])

    def start(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["trainweights", "run", *map(str, arguments)])
        main()

    return start


def test_a_module_is_run_with_its_own_options(start: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        start("json.tool", "--help")
    assert "--sort-keys" in capsys.readouterr().out


def test_a_module_of_the_working_directory_is_run(
    start: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program_of_mine").mkdir()
    (tmp_path / "program_of_mine" / "__main__.py").write_text("import sys; sys.exit(7)", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"^7$"):
        start("program_of_mine")


@pytest.mark.slow
def test_the_command_of_a_package_is_run(start: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        start("transformers", "version")
    assert capsys.readouterr().out.strip().startswith("5.")


def test_a_name_that_is_no_program_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    result = run("run", "no_such_program", "--option", width=200)
    assert result.exit_code == 2
    assert "no such command, file or module in this environment: no_such_program" in unwrapped(result.stderr)


# Ways in which a program ends, and the exception that Python itself then reports. Click knows the first seven.
ENDS = {
    "raise EOFError('no more')": EOFError,
    "raise BrokenPipeError('a connection')": BrokenPipeError,
    "raise KeyboardInterrupt": KeyboardInterrupt,
    "import click; raise click.UsageError('wrong')": click.UsageError,
    "import click; raise click.exceptions.Exit(3)": click.exceptions.Exit,
    "import typer; raise typer.Exit(3)": typer.Exit,
    "import typer; raise typer.Abort": typer.Abort,
    "raise OSError(28, 'No space left on device')": OSError,
    "raise ValueError('wrong')": ValueError,
    "raise GeneratorExit": GeneratorExit,
    "raise SystemExit('a text')": SystemExit,
    "raise SystemExit(None)": SystemExit,
    "import warnings; warnings.simplefilter('error'); warnings.warn('old', FutureWarning)": FutureWarning,
    "from hf_trainweights.errors import UnsupportedError as E; raise E('a', 'b', 'c', 'd')": UnsupportedError,
}


@pytest.mark.parametrize("is_module", [False, True], ids=["file", "module"])
@pytest.mark.parametrize("end", ENDS)
def test_the_error_of_a_program_reaches_python_as_the_program_raised_it(
    end: str,
    is_module: bool,
    start: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a_program.py").write_text(end, encoding="utf-8")
    with pytest.raises(ENDS[end]) as raised:
        start("a_program" if is_module else "a_program.py")
    assert type(raised.value) is ENDS[end]
    assert raised.value.__context__ is None
    assert capsys.readouterr() == ("", "")


# Ways in which a process ends that no test can try in its own.
PROCESSES = {
    "input": "input()",
    "interrupt": "import os, signal; signal.raise_signal(signal.SIGINT)",
    "signal": "import signal; signal.raise_signal(signal.SIGTERM)",
    "at once": "import os; os._exit(9)",
    "text": "import sys; sys.exit('a text')",
    "thread": "import sys, threading; threading.Thread(target=sys.exit, args=(5,)).start()",
    "error in a thread": "import threading; threading.Thread(target=int, args=('x',)).start()",
    "children": """
import multiprocessing, sys
def end(): sys.exit(6)
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=end)
    child.start(), child.join()
    sys.exit(child.exitcode)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", by_default(("interrupt",), PROCESSES))
def test_a_process_ends_as_python_lets_it_end(name: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROCESSES[name], encoding="utf-8")
    expected, actual = (
        subprocess.run([sys.executable, *start, program], stdin=subprocess.DEVNULL, capture_output=True, check=False)
        for start in ((), ("-W", "ignore", "-m", "hf_trainweights", "run"))
    )
    assert (actual.returncode, actual.stdout) == (expected.returncode, expected.stdout)
    assert actual.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]


GENERATES = """
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
model = LlamaForCausalLM(LlamaConfig(**sizes))
import torch
tokens = torch.ones(1, 5, dtype=torch.long)
done = model.generate(tokens, max_new_tokens=2, return_dict_in_generate=True, pad_token_id=0)
print(type(done.past_key_values).__name__, getattr(done.past_key_values, "kinds", None))
"""


@pytest.mark.slow  # the program imports Transformers
def test_a_program_generates_with_a_cache_of_keys_and_values(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(GENERATES, encoding="utf-8")
    done = run_command("run", "--kv-cache", "int8/int4", script)
    assert done.stdout == "KVCache ('int8', 'int4')\n", done.stderr


def test_a_kind_of_cache_that_there_is_not_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "program.py").touch()
    result = run("run", "--kv-cache", "int3", tmp_path / "program.py")
    assert result.exit_code == 2
    assert "expected bf16, int8, int8/int4 or int4, found int3" in unwrapped(result.output)
