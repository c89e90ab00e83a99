"""Weights outside a run, as the caller names them, as the anchor of its checkpoints: a fine-tune starts from such ones.

The star of anchors.py has the base in its middle then, from the first checkpoint on. There is no full checkpoint
to begin with, and none to begin anew with after some saves: a difference to the base stays far smaller than weights in
full. So a base serves until its deltas have become two bits per weight more expensive than the first was. Beginning a
new star then costs less within eight saves: one full checkpoint has 10 to 24 bits more than a delta.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn

from hf_trainweights.checkpoint.codecs.delta_uniform import rms_difference
from hf_trainweights.checkpoint.encoded.base_weights import (
    BaseWeights,
    cached_snapshots,
    identify_base,
    register_base,
    require_weights,
    snapshot_path,
)
from hf_trainweights.checkpoint.encoded.structure import anchor_file_name
from hf_trainweights.checkpoint.run.anchors import AnchorRecord, WeightsAnchor
from hf_trainweights.checkpoint.run.checkpoints import step_of, steps_since_last_save
from hf_trainweights.checkpoint.run.job import BaseChoice, SaveJob
from hf_trainweights.checkpoint.run.verification import TRAINER_STATE_NAME
from hf_trainweights.errors import ConfigError, CorruptFileError, TrainWeightsError, UnsupportedError
from hf_trainweights.files.atomic import link_or_copy, replace_file
from hf_trainweights.files.reading import open_regular_file, read_chunks
from hf_trainweights.models.host.origin import model_origin

# The choice that means what the model was loaded from.
_OF_THE_MODEL = "base"
# Two weights that have nothing to do with each other differ by 1.4 times the rms of one; a fine-tune moves by a
# thousandth of it. A difference says nothing about drift where the base is not where a weight began.
_LARGEST_DRIFT = 0.5


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


def base_candidate(job: SaveJob) -> WeightsAnchor | None:
    """Return the base that a save was given as a candidate that has not served yet; None without a base.

    ConfigError: there are no plain weights where the base should be.
    """
    if job.base is None:
        return None
    base = identify_base(job.base.path)
    interval_steps = steps_since_last_save(job.path) or _noted_interval(job.directory, step_of(job.path))
    record = AnchorRecord(base.sha256, saves=0)
    kept = {"base": base, "keep_base": job.base.keep}
    return WeightsAnchor(path=job.directory, record=record, interval_steps=interval_steps, **kept)


def open_base(candidate: WeightsAnchor, weights: Mapping[str, Any]) -> BaseWeights | None:
    """Open the base of a candidate under the names of a checkpoint's flat state dict.

    None, with a warning, if it is gone, has changed or shares no weight with the checkpoint.
    """
    assert candidate.base is not None
    try:
        base = BaseWeights(candidate.base, candidate.path.absolute()).named_as(weights)
    except (CorruptFileError, FileNotFoundError) as error:
        warnings.warn(f"The next checkpoint is stored without its base: {error}", stacklevel=2)
        return None
    if not any(True for _ in base):
        warnings.warn(f"{candidate.base} has no weight of this checkpoint's names and shapes.", stacklevel=2)
        return None
    return base


def keep_files(base: BaseWeights, directory: Path) -> tuple[Path, ...]:
    """Keep the files of a base in a checkpoint directory under their digests, and return them.

    Files of the Hub's cache and of other checkpoints never change, so they are linked. A program may write over other
    files where they are, and would change what is linked to them; they are copied once.
    """
    kept = []
    for name, file in base.files.items():
        target = directory / anchor_file_name(base.base.files[name])
        if not target.exists():
            if base.base.repository is not None or file.name == target.name:
                link_or_copy(file, target)
            else:
                with replace_file(target) as copy:
                    for chunk in read_chunks(file):
                        copy.write(chunk)
        kept.append(target)
    return tuple(kept)


def drift_from_base(
    path: Path, interval_steps: int | None, weights: Mapping[str, Any], distance_rms: Mapping[str, float]
) -> dict[str, float]:
    """Return how far weights move between two saves, given by name the rms of their distance to the base.

    The steps of the lossy modes may not be coarser for a run that is old already: they are taken from the share of the
    way that one interval between saves has, as if weights had drifted steadily. Weights that did not begin at the base
    have no entry, so they are exact.
    """
    step = step_of(path)
    share = min(interval_steps / step, 1.0) if step and interval_steps else 1.0
    return {
        name: rms * share
        for name, rms in distance_rms.items()
        if rms <= _LARGEST_DRIFT * rms_difference(weights[name].cpu())
    }


def _noted_interval(directory: Path, step: int | None) -> int | None:
    """Return the steps from one save to the next as a Trainer notes them, at most those that the run has."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, CorruptFileError):
        with open_regular_file(directory / TRAINER_STATE_NAME) as file:
            save_steps = int(json.load(file)["save_steps"])
        return max(1, min(save_steps, step or save_steps))
    return step
