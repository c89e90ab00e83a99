"""A file that takes the place of another one under its name as well."""

from __future__ import annotations

from pathlib import Path

from hf_trainweights.files.atomic import link_or_copy, move_file
from hf_trainweights.files.temporary import temporary_path


def replace_by_link(source: Path, target: Path) -> None:
    """Make a file take the place of another one in the same directory under its name as well, durably.

    Args:
        source: A regular file whose data are on the disk.
        target: The other file, which stays whole until the last step.

    Raises:
        CorruptFileError: `source` is no regular file.
        OSError: The disk is full or refuses; `target` is as it was.
    """
    aside = temporary_path(target.parent)
    link_or_copy(source, aside)
    move_file(aside, target)
