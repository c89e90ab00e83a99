"""A new checkpoint directory: written aside and renamed into place, so that it appears complete or not at all.

Its weights are a difference to the run's anchor if there is one and no new one is due. The caller may name a base:
weights outside the run, such as those that a fine-tune starts from. All checkpoints of the run then refer to the base,
from the first one on. The run needs no full checkpoint, neither at the beginning nor after some saves, because a
difference to the base stays far smaller than full weights.

docs/checkpoint_files.md lists the files that a directory may hold.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_trainweights.checkpoint.encoded.encoder import encode_file
from hf_trainweights.checkpoint.encoded.reader import identify_base
from hf_trainweights.checkpoint.encoded.storage_tasks import Plan
from hf_trainweights.checkpoint.encoded.structure import anchor_file_name
from hf_trainweights.checkpoint.manifest import FileEntry, Manifest, read_manifest, write_manifest
from hf_trainweights.checkpoint.planning.optimizers import STATES_KEY, states_entry
from hf_trainweights.checkpoint.planning.policy import LOSSY_MODES
from hf_trainweights.checkpoint.run.anchors import AnchorRecord
from hf_trainweights.checkpoint.run.checkpoints import (
    OPTIMIZER_NAME,
    checkpoint_directories,
    step_of,
    steps_since_last_save,
    trainer_state,
)
from hf_trainweights.checkpoint.run.job import SaveJob
from hf_trainweights.checkpoint.run.weights import Weights, WeightsAnchor, encode_weights, encoded_entry
from hf_trainweights.errors import CorruptFileError, UnstorableError
from hf_trainweights.files.atomic import create_directory, save_errors


def find_anchor_candidate(job: SaveJob, weights_name: str) -> WeightsAnchor | None:
    """Return the anchor or base that the newest other checkpoint of the run records in a readable manifest.

    If no checkpoint records one, return the job's base, or None. `weights_name` is the name of the weights file in
    each checkpoint, which may itself be the anchor. The steps since the last save, which the result has, tell later how
    far weights have drifted. Digests are checked later, when the anchor is opened.
    ConfigError: the base of the job has no plain weights.
    """
    interval_steps = steps_since_last_save(job.path)
    for directory in checkpoint_directories(job.path.parent):
        if directory.absolute() == job.path.absolute():
            continue
        try:
            manifest = read_manifest(directory)
            record = AnchorRecord.from_dict(manifest.anchor or {})  # CorruptFileError if there is no anchor
        except (CorruptFileError, OSError):
            continue
        candidate = WeightsAnchor(path=directory, record=record, interval_steps=interval_steps)
        if manifest.base is not None and manifest.base.sha256 == record.sha256:
            return replace(candidate, base=manifest.base, keeps_base=manifest.keeps_base)
        weights = manifest.files.get(weights_name)
        is_anchor_itself = weights is not None and weights.sha256 == record.sha256
        anchor = directory / (weights_name if is_anchor_itself else anchor_file_name(record.sha256))
        if anchor.is_file() and not anchor.is_symlink():
            return replace(candidate, path=anchor)
    if job.base is None:
        return None
    base = identify_base(job.base.path)
    # The Trainer has written its state into the directory where this job writes. The new checkpoint may keep the files
    # of the base in the same directory.
    interval_steps = interval_steps or _noted_interval(job.directory, step_of(job.path))
    record = AnchorRecord(base.sha256, saves=0)
    return WeightsAnchor(path=job.directory, record=record, interval_steps=interval_steps, base=base)


def _noted_interval(directory: Path, step: int | None) -> int | None:
    """Return the steps between saves that a Trainer noted, at most `step`; `step` itself if it noted none."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        save_steps = int(trainer_state(directory)["save_steps"])
        return max(1, min(save_steps, step or save_steps))
    return step


def save_new_directory(
    job: SaveJob,
    weights: Weights,
    trees: Mapping[str, tuple[Any, Plan]],
    *,
    as_they_are: Mapping[str, bytes] | None = None,
    **manifest_fields: Any,
) -> Manifest:
    """Save a checkpoint into a missing or empty directory, which appears complete or not at all.

    Directories called `checkpoint-<step>` beside it may hold the anchor. `trees` are the further files to encode, by
    name: a tree of values with its plan. `as_they_are` are files that are not encoded. UnstorableError names file and
    key.
    """
    with save_errors(job.path, "Earlier checkpoints are untouched."), create_directory(job.path) as temporary:
        job = replace(job, temporary=temporary)
        files, anchor = save_weights(job, weights)
        for name, (tree, plan) in trees.items():
            with _named_in_errors(name):
                files[name] = save_tree(job, name, tree, plan)
        for name, content in (as_they_are or {}).items():
            with job.open_file(name) as file:
                file.write(content)
            files[name] = FileEntry(file.size_bytes, file.sha256())
        if OPTIMIZER_NAME in trees:
            states = recorded_states(job, weights.optimizer_class, files[OPTIMIZER_NAME])
            manifest_fields["metadata"] = {**manifest_fields.get("metadata", {}), **states}
        manifest = Manifest(files, job.policy.mode, **anchor, **manifest_fields)
        write_manifest(temporary, manifest)
    return manifest


def save_weights(job: SaveJob, weights: Weights) -> tuple[dict[str, FileEntry], dict[str, Any]]:
    """Save the weights file of a checkpoint, and beside it links to the anchors that it needs.

    The file is a difference to the run's anchor or base if there is one and no new one is due. Return the manifest's
    entries of these files, and its fields `anchor` and `base`, from which the next checkpoint finds its anchor.
    UnstorableError names file and key. ConfigError: the base of the job has no plain weights.
    """
    candidate = None
    with job.open_file(weights.file_name) as file, _named_in_errors(weights.file_name):
        if job.anchor_every is not None:
            candidate = find_anchor_candidate(job, weights.file_name)
        encoded = encode_weights(job, weights, candidate, file)
    entry = encoded_entry(file, encoded.written)
    return {weights.file_name: entry, **encoded.link_entries}, encoded.fields(entry)


def recorded_states(job: SaveJob, optimizer_class: str | None, entry: FileEntry) -> dict[str, Any]:
    """Return the manifest's metadata about saved optimizer states: the optimizer's class, and which were rounded."""
    is_lossy = job.policy.mode in LOSSY_MODES
    return {STATES_KEY: states_entry(optimizer_class, entry.report["tensors"], is_lossy=is_lossy)}


def save_tree(job: SaveJob, name: str, tree: Any, plan: Plan) -> FileEntry:
    """Encode and save another file of a checkpoint; UnstorableError names the key, and an older file stays intact."""
    with job.open_file(name) as file:
        written = encode_file(tree, plan, file)
    return encoded_entry(file, written)


@contextlib.contextmanager
def _named_in_errors(name: str) -> Iterator[None]:
    """Put the name of a file before the key that an `UnstorableError` of the block names."""
    try:
        yield
    except UnstorableError as error:
        raise UnstorableError(f"{name}: {error.where}", error.expected, error.found, error.next_step) from error
