"""`trainweights checkpoint restore`: makes small checkpoints plain, in place or in another directory."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hf_trainweights_cli.checkpoint_rewriting import print_rewritten, rewrite
from hf_trainweights_cli.console import AsJson, Debug, errors_in_one_line, print_json, say, status, with_progress
from hf_trainweights_cli.runs import BaseDirectory, CheckpointOrRun, checkpoints, use_base
from hf_trainweights_cli.tables import show_size


class Target(StrEnum):
    """The layouts that a sharded checkpoint can be restored to."""

    MODEL = "model"
    DCP = "dcp"


def restore(
    path: CheckpointOrRun,
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="With --to: a new or empty directory.", show_default=False)
    ] = None,
    to: Annotated[
        Target | None,
        typer.Option("--to", help="Write a sharded checkpoint to OUT: as a model's directory, or as plain DCP files."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", exists=True, dir_okay=False, help="With --to model: the model's config.json."),
    ] = None,
    base: BaseDirectory = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Turn small checkpoints back into plain files that load without this package, where they are.

    What was rounded stays rounded. Each file is whole at every moment, small or plain.

    With --to and OUT, a sharded checkpoint of any number of ranks, plain or small, is written elsewhere instead: as
    a directory that from_pretrained reads (model), or as plain DCP files (dcp). It stays as it is.
    """
    if (out is None) != (to is None):
        raise typer.BadParameter("Give OUT and --to together, or neither of them.", param_hint="--to")
    if config is not None and to is not Target.MODEL:
        raise typer.BadParameter("Only --to model needs a configuration.", param_hint="--config")
    if out is not None and to is not None:
        _restore_elsewhere(path, out, to, config, as_json=as_json, debug=debug)
        return
    from hf_trainweights.checkpoint import restore_directory

    with errors_in_one_line(debug):
        use_base(base)
        rows = [rewrite(directory, restore_directory) for directory in with_progress("restoring", checkpoints(path))]
    print_rewritten(rows, as_json)


def _restore_elsewhere(path: Path, out: Path, to: Target, config: Path | None, *, as_json: bool, debug: bool) -> None:
    from hf_trainweights.checkpoint.sharded.conversion import restore_as_dcp, restore_as_model

    with errors_in_one_line(debug), status("restoring"):
        if to is Target.MODEL:
            restore_as_model(path, out, config=config)
        else:
            restore_as_dcp(path, out)
    disk_bytes = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    if as_json:
        print_json({"source": str(path), "out": str(out), "layout": to, "disk_bytes": disk_bytes})
    else:
        say(f"written to {out}: {to}, {show_size(disk_bytes)}")
