"""The base of a run: weights outside the run, such as those that a fine-tune starts from, as a user chose them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn

from hf_trainweights.checkpoint.encoded.decoder import BaseWeights
from hf_trainweights.checkpoint.encoded.reader import cached_snapshots, identify_base, register_base, require_weights
from hf_trainweights.checkpoint.run.checkpoints import step_of
from hf_trainweights.errors import ConfigError, TrainWeightsError, UnsupportedError
from hf_trainweights.models.host.models import model_origin

# The value of the option `anchor` that means the weights that the model was loaded from.
_OF_THE_MODEL = "base"


@dataclass(frozen=True)
class BaseChoice:
    """The base that a user chose: a directory or file of weights, and whether checkpoints `keep` a copy of it."""

    path: Path
    keep: bool = False

    @classmethod
    def of(cls, anchor: str | Path | None, keep: bool) -> BaseChoice | None:
        """Return the base that two options choose; ConfigError: it has no weights, or `keep` is set without a base."""
        if anchor is not None:
            require_weights(Path(anchor))
            return cls(Path(anchor).absolute(), keep)
        if keep:
            raise ConfigError("keep_base", "an anchor to keep", "none", "Pass an anchor as well, or leave it out.")
        return None

    def is_kept_by(self, checkpoint: Path, files: Iterable[Path]) -> bool:
        """Return whether a checkpoint keeps the files of the base: by choice, or because its run may write over them.

        A Trainer saves its final model in the directory of the run. It also removes or overwrites checkpoints there.
        """
        run, path = checkpoint.parent.resolve(), self.path.resolve()
        folders = {path if path.is_dir() else path.parent, *(file.resolve().parent for file in files)}
        owned = (folder == run or (folder.parent == run and step_of(folder) is not None) for folder in folders)
        return self.keep or any(owned)


class RunBase:
    """The base of a run, found before the first save. `choice` is None before that, and in a run that has no base.

    `anchor` is `"base"` for the weights that the model was loaded from, or a directory or file of weights, or None.
    ConfigError: there are no weights, or `keep` is set without an `anchor`.
    """

    def __init__(self, anchor: str | Path | None, keep: bool):
        self._keep = keep
        self._is_sought = anchor == _OF_THE_MODEL
        # The repository or path, and the commit, of the model whose base was found.
        self._origin: tuple[str | None, str | None] | None = None
        self.choice = None if self._is_sought else BaseChoice.of(anchor, keep)

    def require_whole_files(self, is_sharded: bool) -> None:
        """Check that the checkpoints can have a base; UnsupportedError: they are sharded, which excludes a base."""
        if is_sharded and (self._is_sought or self.choice is not None):
            next_step = "Leave `anchor` out, or have FSDP save FULL_STATE_DICT."
            raise UnsupportedError("anchor", "checkpoints in whole files", "sharded ones", next_step)

    def find(self, model: nn.Module | None) -> None:
        """Find the weights that a model was loaded from (for an adapter: its base model), if they are to be the base.

        A training that begins again, with weights that have moved, keeps the base that it had. The base is registered
        at each call, because an object that was pickled for this process does not bring the registration along.
        ConfigError: the model was not loaded by `from_pretrained`, or its weights are no longer there.
        """
        if self._is_sought and model is not None:
            module = extract_model_from_parallel(model)
            name, commit = model_origin(module)
            if not name:
                source = f"a {type(model).__name__} that was not loaded by from_pretrained"
                raise ConfigError("anchor", "a model with a base", source, "Pass the path of weights, or leave it out.")
            previous = self.choice.path if self.choice and (name, commit) == self._origin else None
            path = Path(name).absolute() if Path(name).exists() else _snapshot_of(name, commit, module, previous)
            if path != previous:
                self.choice, self._origin = BaseChoice.of(path, self._keep), (name, commit)
        if self.choice is not None:
            register_base(self.choice.path)


def _snapshot_of(repository: str, commit: str | None, model: nn.Module, previous: Path | None) -> Path:
    """Return the snapshot in the Hub's cache that a model was loaded from; newer Transformers do not record its commit.

    `previous` is the snapshot that an earlier call returned for the same repository and commit.
    """
    snapshots = cached_snapshots(repository)
    if not snapshots and previous is None:
        next_step = "Pass the directory of the model that the run starts from."
        raise ConfigError("anchor", f"{repository} in the Hub's cache", "no commit of it there", next_step)
    of_commit = [path for path in snapshots if path.name == commit]
    if of_commit or len(snapshots) == 1:
        return [*of_commit, *snapshots][0]
    weights = model.state_dict()
    # Any commit could serve as base, but differences to the commit that the run starts from are the smallest.
    return next((path for path in snapshots if _has_values(path, weights)), previous or snapshots[0])


def _has_values(snapshot: Path, weights: Mapping[str, Any]) -> bool:
    """Return whether a snapshot and a model have the same values in their largest common weight of two dimensions."""
    try:
        base = BaseWeights(identify_base(snapshot), snapshot).named_as(weights)
    except (TrainWeightsError, OSError):
        return False
    shared = [name for name in base if weights[name].dim() == 2 and not weights[name].is_meta]
    if not shared:
        return False
    name = max(shared, key=lambda name: weights[name].numel())
    return torch.equal(base.tensor(name).to(weights[name].dtype), weights[name].cpu())
