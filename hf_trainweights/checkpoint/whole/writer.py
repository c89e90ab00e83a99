"""A new checkpoint directory: written aside and renamed into place, so that it appears whole or not at all.

docs/checkpoint.md lists the files that it may hold.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hf_trainweights.checkpoint.encoded.base_weights import BaseWeights
from hf_trainweights.checkpoint.encoded.decoder import Anchor
from hf_trainweights.checkpoint.encoded.encoder import WrittenFile, write_file
from hf_trainweights.checkpoint.encoded.storage_tasks import Plan, with_steps
from hf_trainweights.checkpoint.encoded.structure import ANCHOR_SUFFIX, Base
from hf_trainweights.checkpoint.manifest import FileEntry, Manifest, write_manifest
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.run.anchors import (
    MOST_FILES,
    AnchorRecord,
    WeightsAnchor,
    expected_drift_rms,
    find_anchor_candidate,
    link_anchor,
    measure_delta_rms,
    second_moments,
)
from hf_trainweights.checkpoint.run.base import base_candidate, drift_from_base, keep_files, open_base
from hf_trainweights.checkpoint.run.checkpoints import steps_since_last_save
from hf_trainweights.checkpoint.run.job import BaseChoice, SaveJob
from hf_trainweights.errors import UnstorableError
from hf_trainweights.files.atomic import create_directory, remove_files, save_errors
from hf_trainweights.files.reading import DigestedFile
from hf_trainweights.files.torch_zip import Writable

WEIGHTS_NAME = "pytorch_model.bin"


@dataclass(frozen=True)
class Weights:
    """The weights of a checkpoint, a flat state dict, and the facts that decide how they are stored.

    `buffers` are exact in every mode. The optimizer's state says how far the weights drift and which of them never
    moved; its parameters' names are by their index in it.
    """

    state: Mapping[str, Any]
    buffers: Collection[str] = ()
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    optimizer_names: Mapping[Any, str] = field(default_factory=dict)
    file_name: str = WEIGHTS_NAME

    @property
    def as_anchor(self) -> AnchorRecord | None:
        """The record, but for the digest, of their file as an anchor; None if they are not plain tensors only."""
        return AnchorRecord("") if all(isinstance(value, Tensor) for value in self.state.values()) else None


class _Encoded(NamedTuple):
    """The weights of a checkpoint, encoded.

    `anchor` is what the manifest records about the anchor of the next checkpoint; without a digest that is this file.
    `links` are the files that reading this one takes, linked or kept in the job's directory. `base` are the weights
    outside the run that the anchor is.
    """

    written: WrittenFile
    anchor: AnchorRecord | None
    links: Sequence[Path] = ()
    base: Base | None = None


def _encode(job: SaveJob, weights: Weights, file: Writable) -> _Encoded:
    """Encode weights into a file, as a difference to the run's anchor or base if there is one and no new one is due."""
    if job.anchor_every is None:
        return _encode_full(job, weights, {}, file)
    candidate = find_anchor_candidate(job.path, weights.file_name) or base_candidate(job)
    if candidate is None:
        return _encode_full(job, weights, {}, file)
    encoded = None if candidate.is_spent(job.anchor_every) else _encode_delta(job, weights, candidate, file)
    return encoded or _encode_full(job, weights, candidate.step_rms, file)


def _encode_delta(job: SaveJob, weights: Weights, candidate: WeightsAnchor, file: Writable) -> _Encoded | None:
    """Link the anchor and encode against it, tensor by tensor where that is smaller; None where it is of no use."""
    before = {*job.directory.glob(f"*{ANCHOR_SUFFIX}")}
    if candidate.base:
        anchor = open_base(candidate, weights.state)
    else:
        anchor = link_anchor(candidate.path, candidate.record.sha256, job.directory)
    if anchor is None:
        return None
    plan = job.policy.plan_weights(weights.state, anchor, buffers=weights.buffers)
    is_exact = all(each.is_lossless for each in plan.values())
    written, record, links, base = None, weights.as_anchor, (), None
    if any(each.uses_anchor for each in plan.values()):
        moved = {} if is_exact or candidate.record.delta_rms else _drift_rms(candidate, job, weights, anchor)
        written = write_file(
            file,
            weights.state,
            with_steps(plan, candidate.step_rms or moved),
            anchor=anchor,
            anchor_directory=job.path,
            second_moments=second_moments(weights.optimizer, weights.optimizer_names),
        )
        if written.anchor_sha256:
            record = candidate.after_delta(_bits_per_weight(written, weights.state), moved, is_exact=is_exact)
            if isinstance(anchor, BaseWeights):
                keeps = candidate.keep_base or (job.base is not None and job.base.keep)
                links, base = keep_files(anchor, job.directory) if keeps else (), anchor.base
            else:
                links = anchor.files
                if not is_exact and weights.as_anchor and len(links) + 1 < MOST_FILES:
                    record = replace(record, sha256="")  # this file is the next one's anchor
    if isinstance(anchor, Anchor) and not links:
        # The file that is about to be replaced may need those that were there; they go after it.
        remove_files(file for file in anchor.files if file not in before)
    return written and _Encoded(written, record, links, base)


def _drift_rms(
    candidate: WeightsAnchor, job: SaveJob, weights: Weights, anchor: Anchor | BaseWeights
) -> dict[str, float]:
    """Measure how far the weights move between two saves, which takes as long as decoding the anchor."""
    distance_rms = measure_delta_rms(weights.state, anchor)
    if not any(distance_rms.values()):  # the anchor itself, made small once more, says nothing about drift
        return {}
    if candidate.base is None:
        return distance_rms
    return drift_from_base(job.path, candidate.interval_steps, weights.state, distance_rms)


def _encode_full(job: SaveJob, weights: Weights, drift_rms: Mapping[str, float], file: Writable) -> _Encoded:
    """Encode without reference; where the mode is lossy, in steps as fine as those of the next delta are expected."""
    plan = job.policy.plan_weights(weights.state, buffers=weights.buffers)
    if any(each.steps_per_rms for each in plan.values()) and not drift_rms:
        interval_steps = steps_since_last_save(job.path)
        drift_rms = expected_drift_rms(weights.optimizer, weights.optimizer_names, interval_steps)
    return _Encoded(write_file(file, weights.state, with_steps(plan, drift_rms)), weights.as_anchor)


def _bits_per_weight(written: WrittenFile, weights: Mapping[str, Any]) -> float:
    reports = [report for report in written.report if report.role == "weight"]
    elements = sum(weights[report.name].numel() for report in reports)
    return 8 * sum(report.bytes_out for report in reports) / max(elements, 1)


def save_new_directory(
    path: Path,
    policy: Policy,
    weights: Weights,
    trees: Mapping[str, tuple[Any, Plan]],
    *,
    as_they_are: Mapping[str, bytes] | None = None,
    anchor_every: int | None = None,
    base: BaseChoice | None = None,
    **manifest_fields: Any,
) -> Manifest:
    """Save a missing or empty checkpoint directory; it appears whole or not at all.

    Others called `checkpoint-<step>` beside it may hold the anchor; without `anchor_every` it needs no other. `trees`
    are what else is to be stored and how, by file name; `as_they_are` files that are not encoded. UnstorableError names
    file and key.
    """
    with save_errors(path, "Earlier checkpoints are untouched."), create_directory(path) as temporary:
        job = SaveJob(path, policy, anchor_every, base, temporary=temporary)
        files, anchor = save_weights(job, weights)
        for name, (tree, plan) in trees.items():
            with _named_in_errors(name):
                files[name] = save_tree(job, name, tree, plan)
        for name, content in (as_they_are or {}).items():
            with job.open_file(name) as file:
                file.write(content)
            files[name] = FileEntry(file.size_bytes, file.sha256())
        manifest = Manifest(files, policy.mode, **anchor, **manifest_fields)
        write_manifest(temporary, manifest)
    return manifest


def save_weights(job: SaveJob, weights: Weights) -> tuple[dict[str, FileEntry], dict[str, Any]]:
    """Save the weights file of a checkpoint, and beside it links to the anchors that it needs.

    Return the entries of these files, and what the manifest says of the anchor and the base that the next checkpoint
    may use. UnstorableError names file and key. ConfigError: there are no plain weights where the base should be.
    """
    with job.open_file(weights.file_name) as file, _named_in_errors(weights.file_name):
        written, record, links, base = _encode(job, weights, file)
    entry = _entry(file, written)
    entries = {link.name: FileEntry(link.stat().st_size, link.stem) for link in links}  # verified when opened
    anchor = record and asdict(replace(record, sha256=record.sha256 or entry.sha256))
    return {weights.file_name: entry, **entries}, {"anchor": anchor, "base": base}


def save_tree(job: SaveJob, name: str, tree: Any, plan: Plan) -> FileEntry:
    """Save another file of a checkpoint, encoded; UnstorableError names the key, and what was there is still there."""
    with job.open_file(name) as file:
        written = write_file(file, tree, plan)
    return _entry(file, written)


def _entry(file: DigestedFile, written: WrittenFile) -> FileEntry:
    report = {"anchor": written.anchor_sha256, "tensors": [dict(vars(tensor)) for tensor in written.report]}
    return FileEntry(file.size_bytes, file.sha256(), report)


@contextlib.contextmanager
def _named_in_errors(name: str) -> Iterator[None]:
    """Put the name of a file before the key that an `UnstorableError` of the block names."""
    try:
        yield
    except UnstorableError as error:
        raise UnstorableError(f"{name}: {error.where}", error.expected, error.found, error.next_step) from error
