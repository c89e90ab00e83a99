"""Weights that become one encoded file: a difference to the run's anchor or base, or full where there is none.

`encode_weights` decides how far weights may be rounded, writes the file, and says what the next checkpoint needs to
know. A writer of whole files calls it for the weights of a model, and one of ZeRO's files for the slices of one rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hf_trainweights.checkpoint.codecs.delta_uniform import rms_difference
from hf_trainweights.checkpoint.encoded.decoder import Anchor, BaseWeights
from hf_trainweights.checkpoint.encoded.encoder import EncodedFile, encode_file
from hf_trainweights.checkpoint.encoded.storage_tasks import Plan, with_steps
from hf_trainweights.checkpoint.encoded.structure import Base, anchor_file_name
from hf_trainweights.checkpoint.manifest import FileEntry
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.run.anchors import (
    MOST_FILES,
    AnchorRecord,
    expected_drift_rms,
    link_anchor,
    measure_delta_rms,
    second_moments,
)
from hf_trainweights.checkpoint.run.checkpoints import step_of, steps_since_last_save
from hf_trainweights.checkpoint.run.job import SaveJob
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.atomic import link_or_copy, remove_files, replace_file
from hf_trainweights.files.reading import DigestedFile, read_chunks
from hf_trainweights.files.torch_zip import Writable

WEIGHTS_NAME = "pytorch_model.bin"

# A base serves until its deltas take this many bits per weight more than the first one. From then on a full checkpoint
# as new anchor costs less within eight saves: it has 10 to 24 bits more than a delta.
_BASE_REFRESH_BITS = 2.0
# Two unrelated weights differ by 1.4 times the rms of one; a fine-tune moves a weight by a thousandth of it. So if the
# difference exceeds half of the rms, the weight did not begin at the base, and the difference does not show its drift.
_LARGEST_DRIFT = 0.5


@dataclass(frozen=True)
class Weights:
    """The weights of a checkpoint, a flat state dict, and the facts that decide how they are stored.

    `buffers` are exact in every mode. The `optimizer` state shows how far weights drift and which of them never moved.
    `optimizer_names` are its parameters' names by their index in it, and `optimizer_class` shows whether it is Adam.
    """

    state: Mapping[str, Any]
    buffers: Collection[str] = ()
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    optimizer_names: Mapping[Any, str] = field(default_factory=dict)
    optimizer_class: str | None = None
    file_name: str = WEIGHTS_NAME
    interval_steps: int | None = None  # since the save before; None: the names of directories tell

    def plan(self, policy: Policy, anchor: Container[str] = ()) -> Plan:
        """Plan the weights; `anchor` has the names of those that may be stored as a difference."""
        return policy.plan_weights(self.state, anchor, buffers=self.buffers)

    @property
    def as_anchor(self) -> AnchorRecord | None:
        """The record of the new file as an anchor, its digest still empty; None if not all values are plain tensors."""
        return AnchorRecord("") if all(isinstance(value, Tensor) for value in self.state.values()) else None


@dataclass(frozen=True, kw_only=True)
class WeightsAnchor:
    """An anchor file, or a base, that the next checkpoint in whole files may use.

    An earlier checkpoint of the run has the `record` of it. `interval_steps` are the training steps from the last save
    to the next one; None if unknown. `path` is the anchor file in the earlier checkpoint. If there is a `base`, `path`
    is instead the checkpoint directory that may keep the files of the base, and `keeps_base` tells whether it does.
    """

    record: AnchorRecord
    interval_steps: int | None
    path: Path
    base: Base | None = None
    keeps_base: bool = False

    def is_spent(self, anchor_every: int) -> bool:
        """Return whether the next checkpoint should begin a new anchor; a base serves any number of checkpoints."""
        return self.record.is_spent(anchor_every) if self.base is None else self.record.has_aged(_BASE_REFRESH_BITS)

    @property
    def step_rms(self) -> dict[str, float]:
        """The rms by name from which lossy codecs take the steps of the next delta; empty before the first delta."""
        return self.record.step_rms(self.interval_steps)


def _open_base(base: Base, directory: Path, weights: Mapping[str, Any]) -> BaseWeights | None:
    """Open a base, which a checkpoint directory may keep, with its weights named as in `weights`.

    If the base is gone, has changed or shares no weight with the checkpoint, warn and return None.
    """
    try:
        opened = BaseWeights(base, directory.absolute()).named_as(weights)
    except (CorruptFileError, FileNotFoundError) as error:
        warnings.warn(f"The next checkpoint is stored without its base: {error}", stacklevel=2)
        return None
    if not [*opened]:
        warnings.warn(f"{base} has no weight of this checkpoint's names and shapes.", stacklevel=2)
        return None
    return opened


class EncodedWeights(NamedTuple):
    """The weights of a checkpoint, encoded.

    `anchor` is the record of the next checkpoint's anchor, for the manifest; if its digest is empty, the file just
    written is that anchor. `links` are the other files needed to read this one, linked or copied into the job's
    directory. `base` is set if the anchor is a base outside the run.
    """

    written: EncodedFile
    anchor: AnchorRecord | None
    links: Sequence[Path] = ()
    base: Base | None = None

    def fields(self, entry: FileEntry) -> dict[str, Any]:
        """Return the fields of the manifest from which the next checkpoint finds its anchor; `entry` is the file's."""
        record = self.anchor and asdict(replace(self.anchor, sha256=self.anchor.sha256 or entry.sha256))
        return {"anchor": record, "base": self.base}

    @property
    def link_entries(self) -> dict[str, FileEntry]:
        """The entries of the links in a manifest; their digests were verified when the anchor was opened."""
        return {link.name: FileEntry(link.stat().st_size, link.stem) for link in self.links}


def encode_weights(job: SaveJob, weights: Weights, candidate: WeightsAnchor | None, file: Writable) -> EncodedWeights:
    """Encode weights into a file, against the candidate if there is one and no new anchor is due, else in full."""
    if candidate is not None and job.anchor_every is not None and not candidate.is_spent(job.anchor_every):
        encoded = _encode_delta(job, weights, candidate, file)
        if encoded is not None:
            return encoded
    return _encode_full(job, weights, candidate.step_rms if candidate else {}, file)


def _encode_delta(job: SaveJob, weights: Weights, candidate: WeightsAnchor, file: Writable) -> EncodedWeights | None:
    """Link the anchor and encode each tensor against it if that is smaller; None if no tensor can use the anchor."""
    if candidate.base:
        anchor = _open_base(candidate.base, candidate.path, weights.state)
    else:
        anchor = link_anchor(candidate.path, candidate.record.sha256, job.directory)
    if anchor is None:
        return None
    plan = weights.plan(job.policy, anchor)
    is_exact = all(choice.is_lossless for choice in plan.values())
    written, record, links, base = None, weights.as_anchor, (), None
    if any(choice.uses_anchor for choice in plan.values()):
        moved = {} if is_exact or candidate.record.delta_rms else _drift_rms(candidate, job, weights, anchor)
        written = encode_file(
            weights.state,
            with_steps(plan, candidate.step_rms or moved),
            file,
            anchor=anchor,
            anchor_directory=job.path,
            second_moments=second_moments(weights.optimizer, weights.optimizer_names, weights.optimizer_class),
        )
        if written.anchor_sha256:
            bits, interval_steps = _bits_per_weight(written, weights.state), candidate.interval_steps
            record = candidate.record.after_delta(bits, moved, interval_steps, is_exact=is_exact)
            if isinstance(anchor, BaseWeights):
                files = anchor.files.values()
                keeps = candidate.keeps_base or (job.base is not None and job.base.is_kept_by(job.path, files))
                links, base = _keep_files(anchor, job.directory) if keeps else (), anchor.base
            else:
                links = anchor.files
                if not is_exact and weights.as_anchor and len(links) + 1 < MOST_FILES:
                    record = replace(record, sha256="")  # this file becomes the anchor of the next checkpoint
    if job.temporary and isinstance(anchor, Anchor) and not links:
        remove_files(anchor.files)  # rewriting in place removes them in `Listing.write_manifest`
    return written and EncodedWeights(written, record, links, base)


def _keep_files(base: BaseWeights, directory: Path) -> tuple[Path, ...]:
    """Link or copy the files of a base into a checkpoint directory under their digests, and return the new paths.

    Files of the Hub's cache and of other checkpoints never change, so they are linked. Other files are copied once,
    because a program that overwrites one of them in place would change its links as well.
    """
    targets = []
    for name, file in base.files.items():
        target = directory / anchor_file_name(base.base.files[name])
        if not target.exists():
            if base.base.repository is not None or file.name == target.name:
                link_or_copy(file, target)
            else:
                with replace_file(target, [file]) as copy:
                    for chunk in read_chunks(file):
                        copy.write(chunk)
        targets.append(target)
    return tuple(targets)


def _drift_rms(
    candidate: WeightsAnchor, job: SaveJob, weights: Weights, anchor: Anchor | BaseWeights
) -> dict[str, float]:
    """Measure how far each weight moves between two saves, which takes as long as decoding the anchor.

    The distance to a base grows with the age of the run, but lossy steps must not become coarser with it. So the drift
    is the share of that distance that falls to one interval between saves, as if weights had moved steadily. Weights
    that did not begin at the base have no entry, so they are stored exactly.
    """
    distance_rms = measure_delta_rms(weights.state, anchor)
    if not any(distance_rms.values()):  # the anchor itself is compressed again, which shows no drift
        return {}
    if candidate.base is None:
        return distance_rms
    step = step_of(job.path)
    share = min(candidate.interval_steps / step, 1.0) if step and candidate.interval_steps else 1.0
    return {
        name: rms * share
        for name, rms in distance_rms.items()
        if rms <= _LARGEST_DRIFT * rms_difference(weights.state[name].cpu())
    }


def _encode_full(job: SaveJob, weights: Weights, drift_rms: Mapping[str, float], file: Writable) -> EncodedWeights:
    """Encode without reference; a lossy mode uses steps as fine as those expected of the next delta."""
    plan = weights.plan(job.policy)
    if any(choice.steps_per_rms for choice in plan.values()) and not drift_rms:
        interval_steps = weights.interval_steps or steps_since_last_save(job.path)
        drift_rms = expected_drift_rms(
            weights.optimizer, weights.optimizer_names, interval_steps, weights.optimizer_class
        )
    return EncodedWeights(encode_file(weights.state, with_steps(plan, drift_rms), file), weights.as_anchor)


def _bits_per_weight(written: EncodedFile, weights: Mapping[str, Any]) -> float:
    reports = [report for report in written.report if report.role == "weight"]
    elements = sum(weights[report.name].numel() for report in reports)
    return 8 * sum(report.bytes_out for report in reports) / max(elements, 1)


def encoded_entry(file: DigestedFile, written: EncodedFile) -> FileEntry:
    """Return the manifest's entry of an encoded file that was just written."""
    # ZeRO 3 writes an empty tensor in the place of each weight.
    rows = [dict(vars(tensor)) for tensor in written.report if tensor.bytes_in]
    report = {"anchor": written.anchor_sha256, "tensors": rows}
    return FileEntry(file.size_bytes, file.sha256(), report)
