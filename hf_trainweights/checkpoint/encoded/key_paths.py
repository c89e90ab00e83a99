"""Where in a tree a value is, and the errors that say so."""

from __future__ import annotations

import reprlib

from hf_trainweights.errors import CorruptFileError

Key = str | int | float | bool | None
KeyPath = tuple[Key, ...]

# Names of parameters have about 100 characters. A file may claim a key of a megabyte, above many tensors.
_SHOWN_CHARACTERS = 500


def path_text(path: KeyPath) -> str:
    """Return a key path as people write it, e.g. `state.0.exp_avg`; of a key the first 500 characters."""
    return ".".join(str(key)[:_SHOWN_CHARACTERS] for key in path) or "the value itself"


def corrupt(where: str, expected: str, found: object) -> CorruptFileError:
    """Return the error to raise for a file that this package did not write so."""
    next_step = "The file is damaged or was not written by hf_trainweights: restore it from a copy."
    # A list may be a thousand levels deep, which str() gives up at.
    text = reprlib.repr(found) if isinstance(found, list | dict) else str(found)
    return CorruptFileError(where, expected, text[:200], next_step)
