"""Measures the sizes of the demo's checkpoints, and the losses of a run that resumes from one of them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from hf_trainweights.checkpoint.loop.manager import CheckpointManager
from hf_trainweights.checkpoint.run.checkpoints import checkpoint_directories, checkpoint_step
from hf_trainweights.report.runs import SavedCheckpoint, read_run

MODE = "near-lossless"
SAVES = 3
_RESUMED_STEPS = 10

# Trains new objects on batches, after the manager has restored them, and returns the loss of each step that it took.
Train = Callable[[CheckpointManager, Tensor], Sequence[float]]


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a training run, and the losses of a second run that resumed from one of them.

    Args:
        mode: The mode of the checkpoints.
        saved: The checkpoints, the oldest first.
        resumed_at: The step of the checkpoint that the second run resumed from; None if there was no second run.
        resumed_losses: The losses of the second run's first steps.
        largest_difference: The largest |difference| of these losses to the first run's losses, in nats.
    """

    mode: str
    saved: tuple[SavedCheckpoint, ...]
    resumed_at: int | None = None
    resumed_losses: tuple[float, ...] = ()
    largest_difference: float = 0.0

    @property
    def plain_bytes(self) -> int:
        """Bytes of all checkpoints without encoding."""
        return sum(checkpoint.plain_bytes for checkpoint in self.saved)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all checkpoints on disk."""
        return sum(sum(checkpoint.part_bytes) for checkpoint in self.saved)


def measure_checkpoints(root: Path, batches: Tensor, losses: Sequence[float], train: Train) -> Checkpoints:
    """Measure the checkpoints of a run, and resume a copy from the last but one, as if the run had been killed then."""
    saved, directories = tuple(read_run(root)), checkpoint_directories(root)
    if len(directories) < 2:
        return Checkpoints(MODE, saved)
    middle = directories[1]
    step = checkpoint_step(middle)
    with tempfile.TemporaryDirectory(prefix="trainweights-") as copy:
        # A manager resumes from the newest checkpoint, so the copied run has only this one.
        shutil.copytree(middle, Path(copy, middle.name))
        with CheckpointManager(copy, mode=MODE, every_steps=len(batches)) as manager:
            resumed = train(manager, batches[: step + _RESUMED_STEPS])
    went_on = losses[step : step + len(resumed)]
    largest = max(abs(a - b) for a, b in zip(resumed, went_on, strict=True))
    return Checkpoints(MODE, saved, step, tuple(resumed), largest)
