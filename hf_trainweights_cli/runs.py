"""Finds the checkpoints that a path names: one checkpoint, or all checkpoints of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_PATH_HELP = "A checkpoint directory, or a run: a directory of checkpoint-<step> directories."
CheckpointOrRun = Annotated[Path, typer.Argument(metavar="PATH", exists=True, file_okay=False, help=_PATH_HELP)]
_BASE_HELP = "Directory of the weights that the checkpoints are stored against, if these did not come from the Hub."
BaseDirectory = Annotated[Path | None, typer.Option("--base", metavar="DIR", exists=True, help=_BASE_HELP)]

_CHECKPOINT_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".safetensors")


def checkpoints(path: Path) -> list[Path]:
    """Return the checkpoint directories of a run, the oldest first, or the path alone if it is a checkpoint."""
    from hf_trainweights.checkpoint.dcp.reader import dcp_directories
    from hf_trainweights.checkpoint.manifest import MANIFEST_NAME
    from hf_trainweights.checkpoint.run.checkpoints import checkpoint_directories
    from hf_trainweights.errors import ConfigError

    is_run = not (path / MANIFEST_NAME).exists()
    directories = checkpoint_directories(path)[::-1] if is_run else []
    is_one = not is_run or any(file.suffix in _CHECKPOINT_SUFFIXES for file in path.iterdir()) or dcp_directories(path)
    if directories or is_one:
        return directories or [path]
    expected = "a checkpoint, or a directory of checkpoint-<step> directories"
    raise ConfigError(str(path), expected, "neither", "Give the output directory of a training run.")


def use_base(directory: Path | None) -> None:
    """Register the directory that the user named, if any, so that readers find the checkpoints' base in it."""
    from hf_trainweights.checkpoint import register_base

    if directory is not None:
        register_base(directory)


def require_one_checkpoint(path: Path) -> None:
    """Raise ConfigError unless a path is one checkpoint with a manifest; a run is refused too."""
    from hf_trainweights.checkpoint.manifest import MANIFEST_NAME
    from hf_trainweights.errors import ConfigError

    if (path / MANIFEST_NAME).exists():
        return
    problem, next_step = f"no {MANIFEST_NAME}", f"See `trainweights inspect {path}`, which lists any weights."
    directories = checkpoints(path)
    if directories != [path]:
        problem = f"a run of {len(directories)}"
        next_step = f"Name one, such as {directories[-1]}, or list all by `trainweights checkpoint ls {path}`."
    raise ConfigError(str(path), "one small checkpoint", problem, next_step)
