"""Where in a tree a value is, and the errors that say so."""

from __future__ import annotations

from hf_trainweights.errors import CorruptFileError, TrainWeightsError

Key = str | int | float | bool | None
KeyPath = tuple[Key, ...]


class UnstorableError(TrainWeightsError, TypeError):
    """A value is of a type that an encoded file cannot hold."""


def path_text(path: KeyPath) -> str:
    """Return a key path as people write it, e.g. `state.0.exp_avg`."""
    return ".".join(str(key) for key in path) or "the value itself"


def corrupt(where: str, expected: str, found: object) -> CorruptFileError:
    """Return the error to raise for a file that this package did not write so."""
    next_step = "The file is damaged or was not written by hf_trainweights: restore it from a copy."
    return CorruptFileError(where, expected, str(found)[:200], next_step)
