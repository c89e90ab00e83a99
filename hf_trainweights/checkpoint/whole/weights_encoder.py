"""The weights of a checkpoint -> an encoded file: a delta against the run's anchor, or full as the next anchor."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_trainweights.checkpoint.encoded.anchor import Anchor
from hf_trainweights.checkpoint.encoded.anchor_files import anchor_file_name
from hf_trainweights.checkpoint.encoded.base_identity import Base
from hf_trainweights.checkpoint.encoded.base_weights import BaseWeights
from hf_trainweights.checkpoint.encoded.encoder import WrittenFile, write_file
from hf_trainweights.checkpoint.run.anchors import (
    MOST_FILES,
    AnchorCandidate,
    AnchorRecord,
    find_anchor_candidate,
    link_anchor,
    steps_since_last_save,
    unlink_anchor,
)
from hf_trainweights.checkpoint.run.base_anchor import (
    base_candidate,
    keep_files,
    open_base,
    with_measured_drift,
)
from hf_trainweights.checkpoint.run.drift import expected_drift_rms, measure_delta_rms, second_moments
from hf_trainweights.checkpoint.run.save_job import SaveJob
from hf_trainweights.files.torch_zip_writer import Writable

WEIGHTS_NAME = "pytorch_model.bin"


@dataclass(frozen=True)
class Weights:
    """The weights of a checkpoint, and the facts that decide how they are stored.

    Args:
        state: A flat state dict under module names.
        buffers: Names in it that are buffers; they are exact in every mode.
        optimizer: The optimizer's state dict, which says how far the weights drift and which of them never moved.
        optimizer_names: Its parameters' names by their index in it.
        file_name: The file they go to.
    """

    state: Mapping[str, Any]
    buffers: Collection[str] = ()
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    optimizer_names: Mapping[Any, str] = field(default_factory=dict)
    file_name: str = WEIGHTS_NAME

    @property
    def can_be_anchor(self) -> bool:
        """Whether others can be stored against them: they are plain tensors only."""
        return all(isinstance(value, Tensor) for value in self.state.values())


@dataclass(frozen=True)
class EncodedWeights:
    """The weights of a checkpoint, encoded.

    Args:
        written: What is in the file.
        links: The files that reading this one takes, linked or kept in the job's directory; none if it refers to no
            other, or to a base that is not kept.
        anchor: What the manifest records about the anchor of the next checkpoint, where that is not this file alone.
        is_next_anchor: Whether the next checkpoint's anchor is this file; its record lacks the digest of it.
        base: The weights outside the run that the anchor is.
    """

    written: WrittenFile
    links: Sequence[Path] = ()
    anchor: AnchorRecord | None = None
    is_next_anchor: bool = False
    base: Base | None = None


def encode_weights(job: SaveJob, weights: Weights, file: Writable) -> EncodedWeights:
    """Encode weights into a file, as a difference to the run's anchor or base if there is one and no new one is due."""
    if job.anchor_every is None:
        return _encode_full(job, weights, {}, file)
    candidate = find_anchor_candidate(job.path, weights.file_name) or base_candidate(job)
    if candidate is None:
        return _encode_full(job, weights, {}, file)
    encoded = None if candidate.is_spent(job.anchor_every) else _encode_delta(job, weights, candidate, file)
    return encoded or _encode_full(job, weights, candidate.step_rms, file)


def _encode_delta(job: SaveJob, weights: Weights, candidate: AnchorCandidate, file: Writable) -> EncodedWeights | None:
    """Link the anchor and encode against it, tensor by tensor where that is smaller; None where it is of no use."""
    before = {*job.directory.glob(anchor_file_name("*"))}
    anchor = open_base(candidate, weights.state) if candidate.base else link_anchor(candidate, job.directory)
    if anchor is None:
        return None
    plan = job.policy.plan_delta(weights.state, anchor, buffers=weights.buffers)
    encoded = None
    if plan.uses_anchor:
        if not plan.is_lossless:
            candidate = _with_steps(candidate, job, weights, anchor)
        written = write_file(
            file,
            weights.state,
            plan.with_steps(candidate.step_rms),
            anchor=anchor,
            anchor_link=job.path / anchor_file_name(anchor.sha256),
            second_moments=second_moments(weights.optimizer, weights.optimizer_names),
        )
        encoded = EncodedWeights(written)
        if written.anchor_sha256:
            bits = _bits_per_weight(written, weights.state)
            record = candidate.record.after_delta(bits, candidate.fineness, is_exact=plan.is_lossless)
            if isinstance(anchor, BaseWeights):
                encoded = EncodedWeights(written, _kept_files(job, candidate, anchor), record, base=anchor.base)
            else:
                goes_on = not plan.is_lossless and weights.can_be_anchor and len(anchor.files) + 1 < MOST_FILES
                encoded = EncodedWeights(written, anchor.files, record, goes_on)
    if isinstance(anchor, Anchor) and (encoded is None or not encoded.links):
        # The file that is about to be replaced may need those that were there; they go after it.
        unlink_anchor(file for file in anchor.files if file not in before)
    return encoded


def _kept_files(job: SaveJob, candidate: AnchorCandidate, base: BaseWeights) -> Sequence[Path]:
    keeps = candidate.keep_base or (job.base is not None and job.base.keep)
    return keep_files(base, job.directory) if keeps else ()


def _with_steps(
    candidate: AnchorCandidate, job: SaveJob, weights: Weights, anchor: Anchor | BaseWeights
) -> AnchorCandidate:
    """Measure how far the weights have moved, unless an earlier delta did: it takes as long as decoding the anchor."""
    if candidate.record.delta_rms:
        return candidate
    delta_rms = measure_delta_rms(weights.state, anchor)
    # The anchor itself, made small once more, says nothing about how far weights move.
    delta_rms = delta_rms if any(delta_rms.values()) else {}
    if candidate.base is not None:
        return with_measured_drift(candidate, job.path, weights.state, delta_rms)
    record = replace(candidate.record, delta_rms=delta_rms, interval_steps=candidate.interval_steps)
    return replace(candidate, record=record)


def _encode_full(job: SaveJob, weights: Weights, drift_rms: Mapping[str, float], file: Writable) -> EncodedWeights:
    """Encode without reference; where the mode is lossy, in steps as fine as those of the next delta are expected."""
    plan = job.policy.plan_full(weights.state, buffers=weights.buffers)
    if plan.lossy and not drift_rms:
        interval_steps = steps_since_last_save(job.path)
        drift_rms = expected_drift_rms(weights.optimizer, weights.optimizer_names, interval_steps)
    return EncodedWeights(write_file(file, weights.state, plan.with_steps(drift_rms)))


def _bits_per_weight(written: WrittenFile, weights: Mapping[str, Any]) -> float:
    reports = [report for report in written.report if report.role == "weight"]
    elements = sum(weights[report.name].numel() for report in reports)
    return 8 * sum(report.bytes_out for report in reports) / max(elements, 1)
