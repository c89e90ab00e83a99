"""The checkpoints of the demo's training: how small they are, and how a run goes on that resumes from one of them."""

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

# Trains fresh objects, which the manager restores, on some batches, and returns the losses of the steps that it took.
Train = Callable[[CheckpointManager, Tensor], Sequence[float]]


@dataclass(frozen=True)
class Checkpoints:
    """What a training run saved, and how it went on from a save in the middle.

    Args:
        mode: How the checkpoints are stored.
        saved: The checkpoints, the first one first.
        resumed_at: The step whose checkpoint a second run resumed from; None if there was none to resume from.
        resumed_losses: The losses of that run's first steps.
        largest_difference: The largest |difference| of these to the losses of the run that went on, in nats.
    """

    mode: str
    saved: tuple[SavedCheckpoint, ...]
    resumed_at: int | None = None
    resumed_losses: tuple[float, ...] = ()
    largest_difference: float = 0.0

    @property
    def plain_bytes(self) -> int:
        """Bytes of all checkpoints without encoding."""
        return sum(each.plain_bytes for each in self.saved)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all checkpoints on disk."""
        return sum(sum(each.part_bytes) for each in self.saved)


def measure_checkpoints(root: Path, batches: Tensor, losses: Sequence[float], train: Train) -> Checkpoints:
    """Measure the checkpoints of a run, and resume it from the last but one, as after a kill; they stay as they are."""
    saved, directories = tuple(read_run(root)), checkpoint_directories(root)
    if len(directories) < 2:
        return Checkpoints(MODE, saved)
    middle = directories[1]
    step = checkpoint_step(middle)
    with tempfile.TemporaryDirectory(prefix="trainweights-") as copy:
        # A run of its own has this checkpoint as its newest one.
        shutil.copytree(middle, Path(copy, middle.name))
        with CheckpointManager(copy, mode=MODE, every_steps=len(batches)) as manager:
            resumed = train(manager, batches[: step + _RESUMED_STEPS])
    went_on = losses[step : step + len(resumed)]
    largest = max(abs(a - b) for a, b in zip(resumed, went_on, strict=True))
    return Checkpoints(MODE, saved, step, tuple(resumed), largest)
