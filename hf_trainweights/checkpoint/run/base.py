"""`RunBase`: the weights outside a run that its checkpoints are stored against, as the caller names them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn

from hf_trainweights.checkpoint.encoded.base_weights import (
    BaseWeights,
    cached_snapshots,
    identify_base,
    register_base,
    require_weights,
    snapshot_path,
)
from hf_trainweights.checkpoint.run.job import BaseChoice
from hf_trainweights.errors import ConfigError, TrainWeightsError, UnsupportedError
from hf_trainweights.models.host.origin import model_origin

# The choice that means what the model was loaded from.
_OF_THE_MODEL = "base"


class RunBase:
    """The base of a run: found once, before anything is saved; without one, or before it is found, `path` is None.

    `anchor` is `"base"` for the weights that the model was loaded from, a directory or a file of weights, or None.
    ConfigError: there are no weights, or `keep` has nothing to keep.
    """

    def __init__(self, anchor: str | Path | None, keep: bool):
        if keep and anchor is None:
            raise ConfigError("keep_base", "an anchor to keep", "none", 'Pass anchor="base", or a path.')
        self.keep = keep
        self.path: Path | None = None
        self._is_sought = anchor == _OF_THE_MODEL
        if anchor is not None and not self._is_sought:
            self.path = Path(anchor).absolute()
            require_weights(self.path)

    def require_whole_files(self, is_sharded: bool) -> None:
        """Check that the checkpoints can have a base; UnsupportedError: each rank writes its own part of them."""
        if is_sharded and (self._is_sought or self.path is not None):
            next_step = "Leave `anchor` out, or have FSDP save FULL_STATE_DICT."
            raise UnsupportedError("anchor", "checkpoints in whole files", "sharded ones", next_step)

    def find(self, model: nn.Module | None) -> None:
        """Find the weights that a model, of an adapter its base model, was loaded from, if they are wanted.

        A base that is known already is registered once more: whoever was pickled for this process left that behind.
        ConfigError: it was not loaded by `from_pretrained`, or its weights are no longer there.
        """
        if self.path is not None:
            register_base(self.path)
            return
        if model is None or not self._is_sought:
            return
        module = extract_model_from_parallel(model)
        name, commit = model_origin(module)
        if not name:
            found = f"a {type(model).__name__} that was not loaded by from_pretrained"
            raise ConfigError("anchor", "a model with a base", found, "Pass the path of weights, or leave it out.")
        path = Path(name)
        if not path.exists():
            snapshot = snapshot_path(name, commit) if commit else None
            path = snapshot if snapshot is not None and snapshot.is_dir() else _snapshot_of(name, module)
        require_weights(path)
        self.path = path.absolute()

    @property
    def choice(self) -> BaseChoice | None:
        """The base for a save; None without one."""
        return None if self.path is None else BaseChoice(self.path, self.keep)


def _snapshot_of(repository: str, model: nn.Module) -> Path:
    """Return the commit in the Hub's cache that a model was loaded from; newer Transformers do not say which."""
    snapshots = cached_snapshots(repository)
    if not snapshots:
        next_step = "Pass the directory of the model that the run starts from."
        raise ConfigError("anchor", f"{repository} in the Hub's cache", "no commit of it there", next_step)
    if len(snapshots) == 1:
        return snapshots[0]
    weights = model.state_dict()
    # Any commit could serve; the one that the run starts from makes the smallest differences.
    return next((path for path in snapshots if _holds(path, weights)), snapshots[0])


def _holds(snapshot: Path, weights: Mapping[str, Any]) -> bool:
    """Return whether a snapshot has the values of a model's largest weight of two dimensions."""
    try:
        base = BaseWeights(identify_base(snapshot), snapshot).named_as(weights)
    except (TrainWeightsError, OSError):
        return False
    shared = [name for name in base if weights[name].dim() == 2 and not weights[name].is_meta]
    if not shared:
        return False
    name = max(shared, key=lambda name: weights[name].numel())
    return torch.equal(base.tensor(name).to(weights[name].dtype), weights[name].cpu())
