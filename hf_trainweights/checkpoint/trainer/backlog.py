"""The checkpoints of a run that wait to be made small: one background thread takes them one after the other.

The work reads files and never live tensors. A checkpoint that cannot be made small is still a whole, plain one. So an
error costs the run only disk space: it is said once, and the checkpoint gets another try together with the next one.
"""

from __future__ import annotations

import logging
import shutil
import threading
from functools import partial
from pathlib import Path

from hf_trainweights.checkpoint.directory import find_checkpoints, layout_of
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME, total_rounding
from hf_trainweights.checkpoint.run.job import SaveJob
from hf_trainweights.checkpoint.run.verification import progress_problem, size_bytes, verify_checkpoint
from hf_trainweights.errors import ConfigError, CorruptFileError

ON_ERROR = ("warn", "raise")

_logger = logging.getLogger(__name__)


class Backlog:
    """The checkpoints of a run that wait to be made small, and as text what became of those that waited.

    `on_error` is `"warn"` to go on with a plain checkpoint, `"raise"` to end the training; ConfigError: it is neither.
    """

    speaks = True
    """Whether this process says what went wrong; of several ranks one does."""

    def __init__(self, on_error: str):
        if on_error not in ON_ERROR:
            raise ConfigError("on_error", " or ".join(ON_ERROR), repr(on_error), "Choose one of these.")
        self._on_error = on_error
        self._waiting: list[SaveJob] = []
        self._failed: dict[Path, SaveJob] = {}
        self._stayed: dict[Path, str] = {}
        self._outcomes: list[tuple[Path, Exception | str]] = []
        self._thread: threading.Thread | None = None
        self._made_small = 0
        self._before_bytes = self._after_bytes = 0
        self._largest_weight_error = 0.0

    def add(self, job: SaveJob) -> None:
        """Take in a checkpoint, and those again that stayed plain; of these one that is gone costs nothing."""
        self._failed.pop(job.path, None)
        self._waiting += [*self._failed.values(), job]
        self._failed.clear()

    def start(self) -> None:
        """Begin to work in the background on what waits, if anything does."""
        if self._waiting and self._thread is None:
            # Not a daemon: the interpreter waits for a checkpoint that is being written.
            self._thread = threading.Thread(target=self._work, name="trainweights-checkpoint", daemon=False)
            self._thread.start()

    def finish(self) -> None:
        """Work here and now on what waits, if the thread does not, and wait for the thread; raise what `blame` does.

        The error of the first checkpoint that has one; the others get another try all the same.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            self._work()
        else:
            thread.join()
        outcomes, self._outcomes = self._outcomes, []
        for directory, outcome in outcomes:
            message = f"{directory.name} stays as it is, plain, and gets another try at the next save:"
            if isinstance(outcome, Exception):
                self.blame(directory, outcome, message)
            elif directory.is_dir():
                self._stay(directory, message, outcome)

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

    def make_small(self, job: SaveJob) -> str | None:
        """Make a checkpoint small, a sharded one by all ranks, and count it; return why there is no room, or None.

        CorruptFileError: a file of it is damaged, and nothing has changed. TrainWeightsError: every file in it is
        whole.
        """
        path = job.path
        if not path.is_dir():
            return None
        manifest = path / MANIFEST_NAME
        if manifest.exists() and not verify_checkpoint(path).intact:
            manifest.unlink()  # of an earlier run, over whose checkpoint of this step the Trainer has just written
        layout, before_bytes = layout_of(path), size_bytes(path)
        if not manifest.exists():
            problem = progress_problem(path) or layout.missing_problem()
            if problem:
                next_step = "The other checkpoints do not need this one; remove it, or restore the file from a copy."
                raise CorruptFileError(str(path), "a whole checkpoint", problem, next_step)
        needed, free = layout.rewriting_bytes(), shutil.disk_usage(path).free
        if free < needed:
            return f"rewriting it takes {needed // 10**6} MB of free disk space, there are {free // 10**6} MB"
        weight_error = total_rounding(layout.compress(job)).get("weight", 0.0)
        after_bytes = size_bytes(path)
        if before_bytes != after_bytes:  # else it was small already, after a push or a resume, and counts once
            self._made_small += 1
            self._before_bytes += before_bytes
            self._after_bytes += after_bytes
            self._largest_weight_error = max(self._largest_weight_error, weight_error)
        return None

    def __str__(self) -> str:
        parts: list[str] = []
        if self._made_small:
            ratio = self._before_bytes / max(1, self._after_bytes)
            sizes = f"{self._before_bytes / 1e6:.1f} MB -> {self._after_bytes / 1e6:.1f} MB ({ratio:.2f}x)"
            error = f"off by at most {self._largest_weight_error:.3g}" if self._largest_weight_error else "exact"
            parts.append(f"{self._made_small} checkpoints made small: {sizes}, weights {error}")
        # One that was removed, or made small with a later one, did not stay plain.
        plain = [path for path in self._stayed if path.is_dir() and not (path / MANIFEST_NAME).exists()]
        if plain:
            names = ", ".join(path.name for path in plain)
            parts.append(f"{len(plain)} stayed plain, {names}; reason of the last: {self._stayed[plain[-1]]}")
        return "; ".join(parts)

    def _work(self) -> None:
        while self._waiting:
            job = self._waiting.pop(0)
            outcome: Exception | str | None
            try:
                outcome = job.ranks.decide(partial(self.make_small, job))
            except Exception as error:
                outcome = error
            if outcome:
                self._failed[job.path] = job
                self._outcomes.append((job.path, outcome))

    def _stay(self, directory: Path, message: str, reason: str) -> None:
        if self.speaks and self._stayed.get(directory) != reason:
            _logger.warning("%s %s", message, reason)
        self._stayed[directory] = reason
