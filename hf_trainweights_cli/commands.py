"""The classes that all commands of `trainweights` share: they show flags, and end a command that cannot go on."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

# The exit code that a shell reports of a process that SIGINT or SIGPIPE has ended: 128 and the number of the signal.
_INTERRUPTED = 130
_BROKEN_PIPE = 141


class AfterCommand(BaseException):
    """Ends a command, so that `main` runs `call` outside of click: of an EOFError click says "Aborted." and no more."""

    def __init__(self, call: Callable[[], object]):
        super().__init__(call)
        self.call = call


class Command(TyperCommand):
    """A command whose help shows flags without a type, as `--json` takes no value, and paragraphs of whole lines."""

    def __init__(self, *arguments: Any, **options: Any):
        # Typer breaks lines where the docstring does, and again where the terminal ends.
        paragraphs = (" ".join(each.split()) for each in (options.get("help") or "").split("\n\n"))
        super().__init__(*arguments, **{**options, "help": "\n\n".join(paragraphs)})

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, flags without a type."""
        return _flags_without_type(super().get_params(ctx))


class Group(TyperGroup):
    """A command of commands; an interrupt ends them in one line, a closed pipe without a word."""

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
        except (BrokenPipeError, EOFError) as error:  # click would say nothing of the first, and little of the second
            if isinstance(error, BrokenPipeError) and _end_streams_without_reader():
                raise typer.Exit(_BROKEN_PIPE) from error
            traceback.print_exception(error)
            raise typer.Exit(1) from error


def lost_its_reader(stream: TextIO) -> bool:
    """Say whether nobody reads a stream any more: a BrokenPipeError may also be that of a connection to the Hub."""
    try:
        stream.flush()  # a write that failed has left in the buffer what it could not write
    except BrokenPipeError:
        return True
    return False


def _end_streams_without_reader() -> bool:
    """Send unread output nowhere, because Python complains when it cannot flush it; return whether there was any."""
    ended = [stream for stream in (sys.stdout, sys.stderr) if lost_its_reader(stream)]
    for stream in ended:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return bool(ended)


new_app = partial(
    typer.Typer,
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
"""Make a command of commands; options are those of `typer.Typer`."""


def _flags_without_type(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters
