"""Live weights that take the place of a Trainer's files: written aside whole, then renamed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hf_trainweights.checkpoint.run.in_place import rewriting
from hf_trainweights.checkpoint.whole.inventory import take_inventory
from hf_trainweights.checkpoint.whole.weights_encoder import WEIGHTS_NAME
from hf_trainweights.files.atomic import create_file_aside, move_file, remove_files
from hf_trainweights.files.save_errors import save_errors
from hf_trainweights.files.temporary import Claim


def set_weights_aside(path: str | Path, weights: Mapping[str, Any]) -> Claim:
    """Save weights in a checkpoint directory under a temporary name, plain and as fast as torch.save.

    They may change afterwards. The claim is for `adopt_weights`; the data may not be on the disk yet.
    """
    path = Path(path).absolute()
    with save_errors(path, "Its files are as they were."), create_file_aside(path) as (claim, file):
        torch.save(dict(weights), file)
    return claim


def adopt_weights(path: str | Path, aside: Claim) -> None:
    """Put weights that were set aside in the place of a checkpoint's weight files.

    A Trainer resumes exactly from the module's names, and its own files may have others. After an error the old weights
    are there, or the new ones; the file aside is gone.
    """
    path = Path(path).absolute()
    try:
        inventory = take_inventory(path)
        with rewriting(path):
            move_file(aside.path, path / WEIGHTS_NAME)
            remove_files(inventory.replaced_by(WEIGHTS_NAME))
    finally:
        with contextlib.suppress(OSError):  # it is moved, or the next save removes it
            aside.path.unlink()
        aside.release()
