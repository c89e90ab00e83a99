"""Weights outside a run as the anchor of its checkpoints: the model that a fine-tune starts from.

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
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_trainweights.checkpoint.codecs.delta_uniform import rms_difference
from hf_trainweights.checkpoint.encoded.base_weights import BaseWeights, identify_base
from hf_trainweights.checkpoint.encoded.structure import ANCHOR_SUFFIX
from hf_trainweights.checkpoint.run.anchors import AnchorRecord, WeightsAnchor
from hf_trainweights.checkpoint.run.checkpoints import checkpoint_step, steps_since_last_save
from hf_trainweights.checkpoint.run.job import SaveJob
from hf_trainweights.checkpoint.run.verification import TRAINER_STATE_NAME
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.atomic import link_or_copy, replace_file
from hf_trainweights.files.reading import open_regular_file, read_chunks

# Two weights that have nothing to do with each other differ by 1.4 times the rms of one; a fine-tune moves by a
# thousandth of it. A difference says nothing about drift where the base is not where a weight began.
_LARGEST_DRIFT = 0.5


def base_candidate(job: SaveJob) -> WeightsAnchor | None:
    """Return the base that a save was given as a candidate that has not served yet; None without a base.

    ConfigError: there are no plain weights where the base should be.
    """
    if job.base is None:
        return None
    base = identify_base(job.base.path)
    interval_steps = steps_since_last_save(job.path) or _noted_interval(job.directory, _step_of(job.path))
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
        target = directory / f"{base.base.files[name]}{ANCHOR_SUFFIX}"
        if not target.exists():
            if base.base.repository is not None or file.name == target.name:
                link_or_copy(file, target)
            else:
                with replace_file(target) as copy:
                    for chunk in read_chunks(file):
                        copy.write(chunk)
        kept.append(target)
    return tuple(kept)


def with_measured_drift(
    candidate: WeightsAnchor, path: Path, weights: Mapping[str, Any], distance_rms: Mapping[str, float]
) -> WeightsAnchor:
    """Record how far weights move between two saves, given by name the rms of their distance to the base.

    The steps of the lossy modes may not be coarser for a run that is old already: they are taken from the share of the
    way that one interval between saves has, as if weights had drifted steadily. Weights that did not begin at the base
    have no entry, so they are exact.
    """
    step, interval_steps = _step_of(path), candidate.interval_steps
    share = min(interval_steps / step, 1.0) if step and interval_steps else 1.0
    drift = {
        name: rms * share
        for name, rms in distance_rms.items()
        if rms <= _LARGEST_DRIFT * rms_difference(weights[name].cpu())
    }
    return replace(candidate, record=replace(candidate.record, delta_rms=drift, interval_steps=interval_steps))


def _step_of(path: Path) -> int | None:
    with contextlib.suppress(ValueError):
        return checkpoint_step(path)
    return None


def _noted_interval(directory: Path, step: int | None) -> int | None:
    """Return the steps from one save to the next as a Trainer notes them, at most those that the run has."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, CorruptFileError):
        with open_regular_file(directory / TRAINER_STATE_NAME) as file:
            save_steps = int(json.load(file)["save_steps"])
        return max(1, min(save_steps, step or save_steps))
    return step
