"""The checkpoints of a run that wait to be made small: one background thread takes them one after the other.

A checkpoint that cannot be made small is still a whole, plain one. So an error costs the run only disk space: it is
said once, and the checkpoint gets another try together with the next one.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from hf_trainweights.checkpoint.directory.discovery import find_checkpoints
from hf_trainweights.checkpoint.trainer.compression import Compression, Savings, is_plain
from hf_trainweights.errors import ConfigError

ON_ERROR = ("warn", "raise")

_logger = logging.getLogger(__name__)


class Backlog:
    """The checkpoints of a run that wait to be made small.

    Args:
        on_error: `"warn"` to go on with a plain checkpoint, `"raise"` to end the training.

    Raises:
        ConfigError: `on_error` is neither.
    """

    speaks = True
    """Whether this process says what went wrong; of several ranks one does."""

    def __init__(self, on_error: str):
        if on_error not in ON_ERROR:
            raise ConfigError("on_error", " or ".join(ON_ERROR), repr(on_error), "Choose one of these.")
        self._on_error = on_error
        self._waiting: list[Compression] = []
        self._failed: dict[Path, Compression] = {}
        self._stayed: dict[Path, str] = {}
        self._outcomes: list[tuple[Compression, Exception | str]] = []
        self._fatal: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._savings = Savings()
        self._said: set[tuple[Path, str]] = set()

    def add(self, compression: Compression) -> None:
        """Take in a checkpoint, and those again that stayed plain; of these one that is gone costs nothing."""
        self._failed.pop(compression.directory, None)
        self._waiting += [*self._failed.values(), compression]
        self._failed.clear()

    def start(self) -> None:
        """Begin to work in the background on what waits, if anything does."""
        if self._waiting and self._thread is None:
            # Not a daemon: the interpreter waits for a checkpoint that is being written.
            self._thread = threading.Thread(target=self._work, name="trainweights-checkpoint", daemon=False)
            self._thread.start()

    def finish(self) -> None:
        """Work here and now on what waits, if the thread does not, and wait for the thread; raise what `blame` does."""
        thread, self._thread = self._thread, None
        if thread is None:
            self._work()
        else:
            thread.join()
        outcomes, self._outcomes = self._outcomes, []
        fatal, self._fatal = self._fatal, None
        errors = [] if fatal is None else [fatal]
        for compression, outcome in outcomes:
            try:
                self._keep_plain(compression, outcome)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def blame(self, directory: Path, error: Exception, message: str) -> None:
        """Say once what went wrong with a checkpoint, and in a sentence what that means for it, or raise the error.

        It is raised where `on_error` says so, no checkpoint beside it is whole, or the memory is full. Nothing is said
        of a checkpoint that is gone: whoever removed it knows.
        """
        if isinstance(error, MemoryError):
            raise error
        if not directory.is_dir():
            return
        if self._on_error == "raise" or all(found.problem for found in find_checkpoints(directory.parent)):
            raise error
        self._stay(directory, message, str(error))

    def __str__(self) -> str:
        stayed = [(directory.name, reason) for directory, reason in self._stayed.items() if is_plain(directory)]
        parts = [str(self._savings)] if self._savings.checkpoints else []
        if stayed:
            names = ", ".join(name for name, _ in stayed)
            parts.append(f"{len(stayed)} stayed plain, {names}; reason of the last: {stayed[-1][1]}")
        return "; ".join(parts)

    def _work(self) -> None:
        try:
            while self._waiting:
                self._try(self._waiting.pop(0))
        except BaseException as error:  # raised again by finish, in the thread that asks
            self._fatal = error

    def _try(self, compression: Compression) -> None:
        try:
            no_room = compression.run(self._savings)
        except Exception as error:
            self._outcomes.append((compression, error))
        else:
            if no_room:
                self._outcomes.append((compression, no_room))

    def _keep_plain(self, compression: Compression, outcome: Exception | str) -> None:
        directory = compression.directory
        self._failed[directory] = compression
        message = f"{directory.name} stays as it is, plain, and gets another try at the next save:"
        if isinstance(outcome, Exception):
            self.blame(directory, outcome, message)
        elif directory.is_dir():
            self._stay(directory, message, outcome)

    def _stay(self, directory: Path, message: str, reason: str) -> None:
        self._stayed[directory] = reason
        if (directory, reason) not in self._said:
            self._said.add((directory, reason))
            if self.speaks:
                _logger.warning("%s %s", message, reason)
