"""The classes that all commands of `trainweights` share. They format help, and end interrupted commands cleanly."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

# The exit codes that a shell reports when SIGINT or SIGPIPE ends a process: 128 plus the number of the signal.
_INTERRUPTED = 130
_BROKEN_PIPE = 141


class AfterCommand(BaseException):
    """Ends a command and lets `main` run `call` outside of click, which would hide an EOFError behind "Aborted."."""

    def __init__(self, call: Callable[[], object]):
        super().__init__(call)
        self.call = call


class Command(TyperCommand):
    """A command whose help shows no type for flags such as `--json`, and wraps paragraphs at the terminal's width."""

    def __init__(self, *arguments: Any, **options: Any):
        # Typer would keep the docstring's line breaks and add others at the terminal's width.
        paragraphs = (" ".join(text.split()) for text in (options.get("help") or "").split("\n\n"))
        super().__init__(*arguments, **{**options, "help": "\n\n".join(paragraphs)})

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, flags without a type."""
        return _flags_without_type(super().get_params(ctx))


class Group(TyperGroup):
    """A command with subcommands. An interrupt ends a subcommand with one line, a closed pipe ends it silently."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, flags without a type."""
        return _flags_without_type(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            typer.echo("interrupted: nothing half-written is left behind", err=True)
            raise typer.Exit(_INTERRUPTED) from error
        except (BrokenPipeError, EOFError) as error:  # click would hide a BrokenPipeError and shorten an EOFError
            if isinstance(error, BrokenPipeError) and _end_streams_without_reader():
                raise typer.Exit(_BROKEN_PIPE) from error
            traceback.print_exception(error)
            raise typer.Exit(1) from error


def lost_its_reader(stream: TextIO) -> bool:
    """Return True if the reader of a stream has gone; a BrokenPipeError may also come from a connection to the Hub."""
    try:
        stream.flush()  # the buffer still has the text of the write that failed
    except BrokenPipeError:
        return True
    return False


def _end_streams_without_reader() -> bool:
    """Redirect streams without a reader to os.devnull, so that Python can flush them; return True if there were any."""
    unread = [stream for stream in (sys.stdout, sys.stderr) if lost_its_reader(stream)]
    for stream in unread:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return bool(unread)


new_app = partial(
    typer.Typer,
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
"""Make a command with subcommands; it takes the options of `typer.Typer`."""


def _flags_without_type(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters
