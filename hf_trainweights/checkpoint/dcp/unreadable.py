"""What stands for the metadata of a checkpoint that cannot be read, until DCP is where errors keep their type."""

from __future__ import annotations


class UnreadableMetadata:
    """Raises an error when anything is asked of it.

    DCP's `load` catches every error of `read_metadata` and raises an AssertionError with its text instead. Errors of
    the calls that follow reach all ranks as they are.

    Args:
        error: The error.
    """

    def __init__(self, error: Exception):
        self._error = error

    def __getattr__(self, name: str) -> object:
        # What __init__ sets is found before this is called; Python's own protocols ask for names of this kind.
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._error
