"""Helpers that all commands share: options, exit codes, errors in one line, JSON and progress."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from hf_trainweights_cli.commands import lost_its_reader

if TYPE_CHECKING:
    from hf_trainweights.errors import ConfigError

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

_SHOWN_CHARACTERS = 2000
# If stderr is no terminal, a command reports after this many seconds that it is still at work.
FIRST_LINE_SECONDS = 10.0

# Functions that the advice in the library's errors names, and the commands that do the same.
_COMMANDS = {
    "quantize_directory": "quantize",
    "dequantize_directory": "dequantize",
    "import_directory": "import",
    "verify_model": "verify",
    "write_report": "report",
    "export_compressed_tensors": "export --to compressed-tensors",
    "export_gguf": "export --to gguf",
    "export_onnx": "export --to onnx",
    "export_torchscript": "export --to torchscript",
    "export_program": "export --to pt2",
}
# An argument of functions that is an option of the commands.
_OPTION = re.compile(r"\bdtype=torch\.(\w+)")
# Matches advice that only a program can follow, with calls or arguments of Python.
_PYTHON = re.compile(r"\w\(|\b[a-z_]+=[\w'{\[]|_pretrained\b")
_SENTENCES = re.compile(r"(?<=\.) (?=[A-Z`])")
_FUNCTION = re.compile(rf"(?:hf_trainweights\.)?\b({'|'.join(_COMMANDS)})\b(?!\()")


@contextlib.contextmanager
def errors_in_one_line(debug: bool) -> Iterator[None]:
    """Print an expected error in one line and exit with 1; with `debug`, raise it."""
    try:
        yield
    except Exception as error:
        from hf_trainweights.errors import TrainWeightsError

        # If the reader of the output has gone, that is no error of the command: `Group` handles it.
        is_unread = isinstance(error, BrokenPipeError) and any(map(lost_its_reader, (sys.stdout, sys.stderr)))
        if debug or is_unread or not isinstance(error, TrainWeightsError | OSError):
            raise
        typer.echo(f"error: {one_line(_by_commands(error))}", err=True)
        raise typer.Exit(1) from error


def _by_commands(error: Exception) -> str:
    """Return an error's text; its advice names commands instead of functions and, if it can, no Python code."""
    advice = getattr(error, "next_step", "")
    named = _FUNCTION.sub(lambda match: f"`trainweights {_COMMANDS[match[1]]}`", advice)
    sentences = _SENTENCES.split(_OPTION.sub(r"--dtype \1", named))
    for_users = [sentence for sentence in sentences if not _PYTHON.search(sentence)]
    return str(error).removesuffix(advice) + " ".join(for_users or sentences)


def wrong_option(error: ConfigError, option: str, next_step: str | None = None) -> typer.BadParameter:
    """Return the usage error for an option that the library refuses; it names the option as users spell it."""
    text = f"expected {error.expected}, found {error.found}. {error.next_step if next_step is None else next_step}"
    return typer.BadParameter(text.rstrip(), param_hint=option)


def exit_with(problems: Sequence[str]) -> None:
    """Print each problem in one line and exit with 1; return if there are no problems."""
    for problem in problems:
        typer.echo(f"problem: {one_line(problem)}", err=True)
    if problems:
        raise typer.Exit(1)


def one_line(text: object) -> str:
    """Return a text as one line, escaped and cut by `printable`."""
    return printable(" ".join(str(text).split()))


def printable(text: object) -> str:
    """Escape the control characters in a text, which may come from any file, and cut it after 2000 characters.

    So the text cannot move the terminal's cursor or change its colors.
    """
    shown = str(text)
    if len(shown) > _SHOWN_CHARACTERS:
        shown = f"{shown[:_SHOWN_CHARACTERS]}..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def say(text: object, *, err: bool = False) -> None:
    """Print one line, escaped and cut by `printable`."""
    typer.echo(printable(text), err=err)


def print_json(value: Any) -> None:
    """Print a value as JSON; NaN and infinities become null, because JSON has no such numbers."""
    typer.echo(json.dumps(_finite(value), indent=2))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def with_progress(action: str, directories: Sequence[Path]) -> Iterator[Path]:
    """Yield the directories, and show on stderr `action` with the current directory and the number done.

    A terminal shows a bar, which disappears at the end. Otherwise print a line for each directory if there are several.
    """
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(directories))
        for done, directory in enumerate(directories):
            shown = printable(f"{action} {directory.absolute().name}")
            progress.update(task, description=shown, completed=done)
            if len(directories) > 1 and not console.is_terminal:
                typer.echo(f"{shown} ({done + 1} of {len(directories)})", err=True)
            yield directory


@contextlib.contextmanager
def status(action: str) -> Iterator[None]:
    """Show `action` with a spinner on a terminal, or print it as `working` does; turn off Transformers' bars."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    console = Console(stderr=True)
    with console.status(action) if console.is_terminal else working(action):
        yield


@contextlib.contextmanager
def working(action: str) -> Iterator[None]:
    """Print on stderr that `action` goes on, after 10 seconds, 20 seconds, 40 seconds and so on.

    On a terminal show the bars of Transformers instead, which are turned off elsewhere.
    """
    done = threading.Event()
    if not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        threading.Thread(target=_report_progress, args=(action, done), daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _report_progress(action: str, done: threading.Event) -> None:
    seconds, passed = FIRST_LINE_SECONDS, 0.0
    while not done.wait(seconds - passed):
        say(f"{action}, {seconds:g} seconds so far", err=True)
        seconds, passed = 2 * seconds, seconds
