"""What sharded checkpoints hold, as JSON, by the reader of this package and by that of PyTorch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from golden.reader import describe
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from hf_trainweights.checkpoint.encoded.reader import register_anchor_directory
from hf_trainweights.distributed import TrainWeightsReader


def load_sharded(run: Path) -> dict[str, Any]:
    """Return what both readers find in a run's sharded checkpoints, by checkpoint."""
    found = {}
    for path in sorted(run.glob("checkpoint-*")):
        register_anchor_directory(path)
        states = []
        for reader in (TrainWeightsReader, FileSystemReader):
            state: dict[str, Any] = {}
            with warnings.catch_warnings(action="ignore"):
                _load_state_dict(state, reader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
            states.append(describe(state))
        assert states[0] == states[1]
        found[path.name] = states[0]
    return found
