"""What a fuzz target is, and which of the errors that it gives are none of a fuzzer's business."""

from __future__ import annotations

import enum
import random
import re
import traceback
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from hf_trainweights.errors import TrainWeightsError

_OUR_FILES = ("/hf_trainweights/", "/hf_trainweights_cli/")
# How torch and Transformers tell people to run whatever a file holds.
_UNSAFE_ADVICE = re.compile(r"weights_only. (to|set to|argument.*to) .False|only if you (got|trust)|add_safe_globals")

# Name of the file in a worker's directory that hostile inputs make if they are run.
CANARY = "canary"


class Outcome(enum.Enum):
    """What became of an input that gave no finding."""

    ACCEPTED = enum.auto()
    REFUSED = enum.auto()


class BrokenPromiseError(AssertionError):
    """An input was accepted and gives other values than it may, or broke another promise than that of typed errors."""


class Target(ABC):
    """One way into the package: mutated inputs, and what may become of them.

    Attributes:
        name: How the command line and the reports call it.
        share: Its part of the time, beside those of the others.
        limit_seconds: After how long an input hangs.
        inputs_in_suite: How many inputs the test suite tries.
        directory: Where it may write, and the current directory of its worker; what the last input left is there.
    """

    name: ClassVar[str]
    share: ClassVar[float] = 1.0
    limit_seconds: ClassVar[float] = 10.0
    inputs_in_suite: ClassVar[int] = 1000
    directory: Path

    def prepare(self, directory: Path) -> None:
        """Build the corpus, always the same; what it writes lies in `directory`, which all workers read."""
        return  # not every target needs a corpus on disk

    @abstractmethod
    def mutate(self, rng: random.Random) -> Any:
        """Return an input, which pickle can keep; nothing else than `rng` decides which."""

    @abstractmethod
    def run(self, given: Any) -> Outcome:
        """Try an input.

        Raises:
            BrokenPromiseError: It was accepted, and what it gives is wrong, or did what it must not do.
            TrainWeightsError: It was refused as it should be.
            Exception: Anything else is a finding, if it passed through the package.
        """


def is_refusal(error: Exception) -> bool:
    """Return whether an error is a right answer: a typed one, or one of code below which ours was not called."""
    if isinstance(error, BrokenPromiseError):
        return False
    return isinstance(error, TrainWeightsError) or not our_frames(error)


def our_frames(error: BaseException) -> list[str]:
    """Return which functions of the package an error passed through, outermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{Path(frame.filename).name}:{frame.name}" for frame in frames if _is_ours(frame.filename)]


def advises_to_trust(text: str) -> bool:
    """Return whether a text tells people to run what a file holds."""
    return _UNSAFE_ADVICE.search(text) is not None


def _is_ours(filename: str) -> bool:
    return any(part in filename for part in _OUR_FILES) and "/tests/" not in filename
