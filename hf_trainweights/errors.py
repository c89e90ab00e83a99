"""Every error this package raises on purpose; each is also the builtin a caller would expect."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TrainWeightsError(Exception):
    """Base class: says where, what was expected, what was found and what to do next.

    Args:
        where: The file, tensor, option or call that is at fault, e.g. `"layers.0.q_proj.weight"`.
        expected: What would have been right.
        found: What was there instead.
        next_step: What the reader should do about it, a full sentence.

    Examples:
        >>> raise ConfigError("group_size", "32, 64 or 128", "48", "Choose one of these.")
        Traceback (most recent call last):
            ...
        hf_trainweights.errors.ConfigError: group_size: expected 32, 64 or 128, found 48. Choose one of these.
    """

    def __init__(self, where: str, expected: str, found: str, next_step: str):
        # One argument, the text: OSError would take four for its own, and load_state_dict shows them as a tuple.
        super().__init__(f"{where}: expected {expected}, found {found}. {next_step}")
        self.where = where
        self.expected = expected
        self.found = found
        self.next_step = next_step

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.where, self.expected, self.found, self.next_step)


class ConfigError(TrainWeightsError, ValueError):
    """An option has a value that is not allowed."""


class QuantizationError(TrainWeightsError, ValueError):
    """A tensor cannot be quantized: NaN, Inf, a wrong shape or dtype."""


class UnsupportedError(TrainWeightsError, NotImplementedError):
    """The call is understood, but there is no correct way to do it on quantized weights."""


class CorruptFileError(TrainWeightsError, ValueError):
    """A file is damaged, incomplete or not what its name says."""


class SaveError(TrainWeightsError, OSError):
    """A file or directory could not be written; what was there before is untouched."""


class MissingAnchorError(TrainWeightsError, FileNotFoundError):
    """A file needs an anchor that is not where it was when the file was written."""


class UnstorableError(TrainWeightsError, TypeError):
    """A value is of a type that an encoded file cannot hold."""


def did_you_mean(found: object, known: Iterable[str], default: str) -> str:
    """Return the next step of an error about a name that is not known: the nearest name that is.

    Args:
        found: What was there; only a string can be misspelt.
        known: The names that would have been right.
        default: The next step where none is near.

    Examples:
        >>> did_you_mean("dwon_proj", ["up_proj", "down_proj"], "Choose one of these.")
        'Did you mean "down_proj"?'
    """
    near = difflib.get_close_matches(found, list(known), n=1) if isinstance(found, str) else []
    return f'Did you mean "{near[0]}"?' if near else default
