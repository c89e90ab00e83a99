"""The errors that this package raises on purpose; each is also the builtin that a caller would expect."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TrainWeightsError(Exception):
    """Base class: an error names the place, the expected value, the actual value and the next step.

    Args:
        where: The file, tensor, option or call that is at fault, e.g. `"layers.0.q_proj.weight"`.
        expected: The value, type or state that would have been right.
        found: The actual one.
        next_step: Advice to the reader, a full sentence.

    Examples:
        >>> raise ConfigError("group_size", "32, 64 or 128", "48", "Choose one of these.")
        Traceback (most recent call last):
            ...
        hf_trainweights.errors.ConfigError: group_size: expected 32, 64 or 128, found 48. Choose one of these.
    """

    def __init__(self, where: str, expected: str, found: str, next_step: str):
        # One argument, the text: OSError would take four as its own fields, and load_state_dict would show a tuple.
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
    """A valid call that quantized weights cannot serve correctly."""


class CorruptFileError(TrainWeightsError, ValueError):
    """A file is damaged or incomplete, or has other content than its name promises."""


class SaveError(TrainWeightsError, OSError):
    """A file or directory could not be written; files that were there before are untouched."""


class MissingAnchorError(TrainWeightsError, FileNotFoundError):
    """A checkpoint's file cannot be read, because the weights that it was stored relative to are missing.

    Such weights are called the anchor. A run stores most checkpoints as differences from the weights of an earlier one,
    which each directory holds as a file named `<digest>.anchor`, or from the model that a fine-tune starts from.
    """


class UnstorableError(TrainWeightsError, TypeError):
    """A value in a training state is of a type that a compressed checkpoint file cannot hold."""


def did_you_mean(wrong_name: object, right_names: Iterable[str], default: str) -> str:
    """Return the next step of an error about a wrong name: a question with the nearest right name, or `default`.

    Examples:
        >>> did_you_mean("dwon_proj", ["up_proj", "down_proj"], "Choose one of these.")
        'Did you mean "down_proj"?'
    """
    near = difflib.get_close_matches(wrong_name, [*right_names], n=1) if isinstance(wrong_name, str) else []
    return f'Did you mean "{near[0]}"?' if near else default
