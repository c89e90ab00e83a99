"""What a file says reaches the terminal as text: no escape sequence, no markup, no endless line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner

import hf_trainweights
from hf_trainweights.checkpoint.directory import compress_directory
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME, FileEntry
from hf_trainweights.errors import UnsupportedError
from hf_trainweights.files.reading import sign_json
from hf_trainweights_cli.console import _COMMANDS, errors_in_one_line, one_line, printable, status, working
from hf_trainweights_cli.export import Layout
from hf_trainweights_cli.main import app

# Colors, a new title of the window, a new line, text that runs from right to left, half a character, and markup.
HOSTILE = "[red]x[/red]\x1b[31m\x1b]0;title\x07\n\u202eback\x9b1m\ud800"


@pytest.fixture
def hostile_checkpoint(tmp_path: Path) -> Path:
    """A checkpoint whose manifest has a right digest and hostile texts wherever a text may stand."""
    path = tmp_path / "checkpoint-1"
    path.mkdir()
    torch.save({"w": torch.ones(64, 64)}, path / "pytorch_model.bin")
    compress_directory(path)
    (path / "\x1b[31mfile.txt").touch()
    fields = json.loads((path / MANIFEST_NAME).read_bytes())
    tensors = fields["files"]["pytorch_model.bin"]["report"]["tensors"]
    tensors[0] |= {"name": HOSTILE, "role": HOSTILE, "codec": HOSTILE}
    fields["files"]["\x9b31m.bin"] = vars(FileEntry(3, "0" * 64))
    texts = dict.fromkeys(("mode", "created", "package_version", "torch_version"), HOSTILE)
    (path / MANIFEST_NAME).write_bytes(sign_json({**fields, **texts, "metrics": {HOSTILE: HOSTILE * 1000}}))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [("checkpoint", "ls"), ("checkpoint", "inspect"), ("checkpoint", "inspect", "--tensors"), ("checkpoint", "verify")],
    ids=" ".join,
)
def test_what_a_manifest_says_is_shown_as_text(arguments: tuple[str, ...], hostile_checkpoint: Path) -> None:
    result = CliRunner().invoke(app, [*arguments, str(hostile_checkpoint)], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert [each for each in result.output if not each.isprintable() and each != "\n"] == []
    assert "\\x9b" in result.output or "[red]x[/red]\\x1b[31m" in result.output
    assert max(map(len, result.output.splitlines())) < 10_000


def test_names_of_tensors_are_shown_as_text(tmp_path: Path) -> None:
    save_file({"[red]x\x1b[31m": torch.zeros(2)}, tmp_path / "model.safetensors")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)], env={"COLUMNS": "200"})
    assert "[red]x\\x1b[31m" in result.stdout
    assert "\x1b" not in result.stdout


def test_a_long_text_is_cut_and_an_ordinary_one_is_as_it_was() -> None:
    assert printable("checkpoint-1/ä.bin: 3 x 4") == "checkpoint-1/ä.bin: 3 x 4"
    assert len(printable("x" * 10**6)) < 3000
    assert one_line("two\n lines\t") == "two lines"


def test_advice_names_commands_in_place_of_functions(capsys: pytest.CaptureFixture[str]) -> None:
    error = UnsupportedError("export_onnx", "a", "b", "Use export_program, or hf_trainweights.quantize_directory.")
    with pytest.raises(typer.Exit), errors_in_one_line(debug=False):
        raise error
    told = "Use `trainweights export --to pt2`, or `trainweights quantize`."
    assert capsys.readouterr().err == f"error: export_onnx: expected a, found b. {told}\n"


@pytest.mark.parametrize(
    ("advice", "told"),
    [
        ("Nothing was written. Pass verify=False to look at the file.", "Nothing was written."),
        ("Save it there. Or pass it: export_gguf(model, out, tokenizer).", "Save it there."),
        (
            "Quantize it with dtype=torch.float16, and export that.",
            "Quantize it with --dtype float16, and export that.",
        ),
        ("Load it in Python. Pass trust_remote_code=True to from_pretrained.", "Load it in Python."),
        ("Call dequantize() first.", "Call dequantize() first."),
    ],
)
def test_advice_leaves_out_what_only_a_program_can_do(
    advice: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit), errors_in_one_line(debug=False):
        raise UnsupportedError("x", "a", "b", advice)
    assert capsys.readouterr().err == f"error: x: expected a, found b. {told}\n"


def test_every_function_that_advice_may_name_is_public_and_its_command_is_there() -> None:
    assert set(_COMMANDS) <= set(hf_trainweights.__all__)
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert {name.partition(" ")[0] for name in _COMMANDS.values()} <= commands
    assert {name.partition("--to ")[2] for name in _COMMANDS.values()} - {""} == {layout.value for layout in Layout}


@pytest.mark.slow
@pytest.mark.parametrize("shown", [working, status])
def test_a_long_command_says_in_a_file_that_it_goes_on_and_a_short_one_nothing(
    shown: Callable[[str], AbstractContextManager[None]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with shown("quantizing"):
        pass
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("hf_trainweights_cli.console.FIRST_LINE_SECONDS", 0.25)
    said = ""
    with shown("quantizing"):
        while said.count("\n") < 2:
            time.sleep(0.01)
            said += capsys.readouterr().err
    assert said.splitlines()[:2] == ["quantizing, 0.25 seconds so far", "quantizing, 0.5 seconds so far"]


# Errors that say nothing of the output: a connection of the Hub's client broke off, a reader met the end of a file.
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (BrokenPipeError(32, "Broken pipe"), "error: [Errno 32] Broken pipe\n"),
        (EOFError("Ran out of input"), "EOFError: Ran out of input\n"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_that_click_hides_is_told_where_the_output_is_read(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(hf_trainweights, "verify_model", fail)
    result = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.endswith(said)
    debugged = CliRunner().invoke(app, ["verify", str(tmp_path), "--debug"])
    assert debugged.exit_code == 1
    assert f"\n{type(error).__name__}: {error}" in debugged.stderr
