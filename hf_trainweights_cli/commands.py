"""What all commands of `trainweights` are made of: how they show flags, and how they end when they are interrupted."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

# What a shell reports of a process that SIGINT or SIGPIPE has ended: 128 and the number of the signal.
INTERRUPTED = 130
_BROKEN_PIPE = 141


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
            raise typer.Exit(INTERRUPTED) from error
        except BrokenPipeError as error:
            # Python would complain when it flushes what nobody reads.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(_BROKEN_PIPE) from error


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
