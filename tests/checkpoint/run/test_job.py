from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hf_trainweights.checkpoint.directory import compress_directory
from hf_trainweights.checkpoint.loop.manager import CheckpointManager
from hf_trainweights.checkpoint.sharded.writer import TrainWeightsWriter
from hf_trainweights.checkpoint.trainer.callback import TrainWeightsCheckpointCallback
from hf_trainweights.errors import ConfigError


@pytest.mark.parametrize(
    "save",
    [
        CheckpointManager,
        TrainWeightsWriter,
        compress_directory,
        lambda _, **options: TrainWeightsCheckpointCallback(**options),
    ],
    ids=["loop", "sharded", "directory", "Trainer"],
)
def test_how_many_checkpoints_an_anchor_serves_is_checked_by_all_that_save(save: Callable, tmp_path: Path) -> None:
    for value in (0, "8", 2.0, True, None):
        with pytest.raises(ConfigError, match="anchor_every: expected an integer of at least 1, found"):
            save(tmp_path, anchor_every=value)
    assert list(tmp_path.iterdir()) == []
