"""A file that takes the place of another one under its name as well."""

from __future__ import annotations

from pathlib import Path

from hf_trainweights.files.atomic import link_or_copy, move_file
from hf_trainweights.files.temporary import temporary_path


def replace_by_link(source: Path, target: Path) -> None:
    """Put a link to a regular file, or a copy, in the place of another file in the same directory, durably."""
    aside = temporary_path(target.parent)
    link_or_copy(source, aside)
    move_file(aside, target)
