"""New directories of models: written aside, then put in place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from hf_trainweights.errors import ConfigError
from hf_trainweights.files.atomic import create_directory, save_errors, sync_tree
from hf_trainweights.files.staging import clean_up

_UNCHANGED = "It is as it was."


def require_vacant_directory(out: Path) -> None:
    """Check that a directory is new or empty, so that nothing is lost by writing a model to it."""
    with save_errors(out, _UNCHANGED):
        if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
            raise ConfigError(str(out), "a new or empty directory", "something there", "Choose another one.")


@contextlib.contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Yield a temporary directory that becomes `out`, durably, unless the block raises: then nothing is left behind."""
    with contextlib.suppress(OSError):  # what a killed call left beside it, unless it is somebody else's
        clean_up(out.parent)
    with save_errors(out, _UNCHANGED), create_directory(out) as temporary:
        yield temporary
        sync_tree(temporary)
