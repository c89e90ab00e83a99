"""`trainweights run`: runs another program after `import hf_trainweights`, so that it can load quantized models."""

from __future__ import annotations

import runpy
import sys
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from hf_trainweights_cli.commands import AfterCommand, Command


class RunCommand(Command):
    """A command that passes all arguments and options after the program's name to the program."""

    allow_interspersed_args = False


def run(
    program: Annotated[str, typer.Argument(metavar="PROGRAM", help="Its command, a .py file or a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Its own arguments.")] = None,
    kv_cache: Annotated[
        str | None, typer.Option("--kv-cache", help="Keys and values of generate: bf16, int8, int8/int4 or int4.")
    ] = None,
) -> None:
    """Run a Python program that is to load quantized models, such as `transformers serve` or `lm_eval`.

    It runs in this process, after `import hf_trainweights`. Where a launcher starts processes of its own, let it start
    this command: `torchrun -m hf_trainweights run train.py`.
    """
    commands = entry_points(group="console_scripts", name=program)
    file = Path(program)
    if not commands and not file.is_file():
        sys.path.insert(0, "")  # the working directory, where `python -m` finds modules too
        if not _is_module(program):
            problem = "no such command, file or module in this environment"
            raise typer.BadParameter(f"expected a Python program, found {problem}: {program}", param_hint="PROGRAM")

    import hf_trainweights  # noqa: F401  (registers the quantizer)

    if kv_cache is not None:
        _use_kv_cache(kv_cache)
    sys.argv = [program, *(arguments or [])]
    if commands:
        raise AfterCommand(lambda: sys.exit(next(iter(commands)).load()()))
    if file.is_file():
        sys.path.insert(0, str(file.absolute().parent))
        raise AfterCommand(partial(runpy.run_path, program, run_name="__main__"))
    raise AfterCommand(partial(runpy.run_module, program, run_name="__main__", alter_sys=True))


def _use_kv_cache(kind: str) -> None:
    """Let `generate` make a cache of a kind such as `int8`, or `int8/int4` for keys and values."""
    from hf_trainweights.cache.generation import use_in_generate
    from hf_trainweights.errors import ConfigError

    keys, _, values = kind.partition("/")
    try:
        use_in_generate((keys, values or keys))
    except ConfigError as error:
        raise typer.BadParameter(
            f"expected bf16, int8, int8/int4 or int4, found {kind}", param_hint="--kv-cache"
        ) from error


def _is_module(name: str) -> bool:
    """Return True if a module of this name exists; do not import it."""
    from importlib.util import find_spec

    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False
