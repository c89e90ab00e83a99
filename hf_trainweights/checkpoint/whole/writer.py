"""A new checkpoint directory: written aside and renamed into place, so that it appears whole or not at all.

Its weights are a difference to the run's anchor if there is one and no new one is due. A run may have a base, weights
outside of it as its caller names them: a fine-tune starts from such ones. They are the middle of the run's star then,
from the first checkpoint on. There is no full checkpoint to begin with, and none to begin anew with after some saves: a
difference to the base stays far smaller than weights in full.

docs/checkpoint.md lists the files that a directory may hold.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hf_trainweights.checkpoint.codecs.delta_uniform import rms_difference
from hf_trainweights.checkpoint.encoded.decoder import Anchor, BaseWeights
from hf_trainweights.checkpoint.encoded.encoder import EncodedFile, encode_file
from hf_trainweights.checkpoint.encoded.reader import identify_base
from hf_trainweights.checkpoint.encoded.storage_tasks import Plan, with_steps
from hf_trainweights.checkpoint.encoded.structure import Base, anchor_file_name
from hf_trainweights.checkpoint.manifest import FileEntry, Manifest, read_manifest, write_manifest
from hf_trainweights.checkpoint.planning.optimizers import STATES_KEY, states_entry
from hf_trainweights.checkpoint.planning.policy import LOSSY_MODES
from hf_trainweights.checkpoint.run.anchors import (
    AnchorCandidate,
    AnchorRecord,
    expected_drift_rms,
    link_anchor,
    measure_delta_rms,
    second_moments,
)
from hf_trainweights.checkpoint.run.checkpoints import (
    OPTIMIZER_NAME,
    checkpoint_directories,
    step_of,
    steps_since_last_save,
    trainer_state,
)
from hf_trainweights.checkpoint.run.job import SaveJob
from hf_trainweights.errors import CorruptFileError, UnstorableError
from hf_trainweights.files.atomic import create_directory, link_or_copy, remove_files, replace_file, save_errors
from hf_trainweights.files.reading import DigestedFile, read_chunks
from hf_trainweights.files.torch_zip import Writable

WEIGHTS_NAME = "pytorch_model.bin"

# How many files reading weights takes at most. In a language model from scratch a save 150 steps after its anchor takes
# 4.7 bits a weight, one 50 steps after it 3.2; each link costs a reader the time to decode the weights once more.
_MOST_FILES = 5
# A base serves until its deltas have become so many bits per weight more expensive than the first was. Beginning a new
# star then costs less within eight saves: one full checkpoint has 10 to 24 bits more than a delta.
_BASE_REFRESH_BITS = 2.0
# Two weights that have nothing to do with each other differ by 1.4 times the rms of one; a fine-tune moves by a
# thousandth of it. A difference says nothing about drift where the base is not where a weight began.
_LARGEST_DRIFT = 0.5


@dataclass(frozen=True)
class Weights:
    """The weights of a checkpoint, a flat state dict, and the facts that decide how they are stored.

    `buffers` are exact in every mode. The optimizer's state says how far the weights drift and which of them never
    moved; its parameters' names are by their index in it, and its class says whether they are Adam's.
    """

    state: Mapping[str, Any]
    buffers: Collection[str] = ()
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    optimizer_names: Mapping[Any, str] = field(default_factory=dict)
    optimizer_class: str | None = None
    file_name: str = WEIGHTS_NAME

    @property
    def as_anchor(self) -> AnchorRecord | None:
        """The record, but for the digest, of their file as an anchor; None if they are not plain tensors only."""
        return AnchorRecord("") if all(isinstance(value, Tensor) for value in self.state.values()) else None


@dataclass(frozen=True, kw_only=True)
class WeightsAnchor(AnchorCandidate):
    """An anchor on disk, or a base, that the next checkpoint in whole files may use.

    `path` is the file under the name that it has in the checkpoint that holds it; of a base the checkpoint directory
    that may keep its files, and `keeps_base` whether it does.
    """

    path: Path
    base: Base | None = None
    keeps_base: bool = False

    def is_spent(self, anchor_every: int) -> bool:
        """Tell whether the next checkpoint should begin a new anchor; a base serves any number of them."""
        return super().is_spent(anchor_every) if self.base is None else self.record.has_aged(_BASE_REFRESH_BITS)


def find_anchor_candidate(job: SaveJob, weights_name: str) -> WeightsAnchor | None:
    """Return the anchor, or base, of the newest other checkpoint of a run whose manifest reads and that has one.

    Where none has, it is the base that the save was given, if any. `weights_name` is that of the weights file in each,
    which may be the anchor itself. Digests are checked when it is opened. ConfigError: there are no plain weights where
    the base should be.
    """
    interval_steps = steps_since_last_save(job.path)
    for directory in checkpoint_directories(job.path.parent):
        if directory.absolute() == job.path.absolute():
            continue
        try:
            manifest = read_manifest(directory)
            record = AnchorRecord.from_dict(manifest.anchor or {})  # refused where there is none
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
    interval_steps = interval_steps or _noted_interval(job.directory, step_of(job.path))
    record = AnchorRecord(base.sha256, saves=0)
    return WeightsAnchor(path=job.directory, record=record, interval_steps=interval_steps, base=base)


def _noted_interval(directory: Path, step: int | None) -> int | None:
    """Return the steps from one save to the next as a Trainer notes them, at most those that the run has."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        save_steps = int(trainer_state(directory)["save_steps"])
        return max(1, min(save_steps, step or save_steps))
    return step


def _open_base(base: Base, directory: Path, weights: Mapping[str, Any]) -> BaseWeights | None:
    """Open a base, which a checkpoint directory may keep, under the names of a checkpoint's flat state dict.

    None, with a warning, if it is gone, has changed or shares no weight with the checkpoint.
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


class _Encoded(NamedTuple):
    """The weights of a checkpoint, encoded.

    `anchor` is what the manifest records about the anchor of the next checkpoint; without a digest that is this file.
    `links` are the files that reading this one takes, linked or kept in the job's directory. `base` are the weights
    outside the run that the anchor is.
    """

    written: EncodedFile
    anchor: AnchorRecord | None
    links: Sequence[Path] = ()
    base: Base | None = None


def _encode_delta(job: SaveJob, weights: Weights, candidate: WeightsAnchor, file: Writable) -> _Encoded | None:
    """Link the anchor and encode against it, tensor by tensor where that is smaller; None where it is of no use."""
    if candidate.base:
        anchor = _open_base(candidate.base, candidate.path, weights.state)
    else:
        anchor = link_anchor(candidate.path, candidate.record.sha256, job.directory)
    if anchor is None:
        return None
    plan = job.policy.plan_weights(weights.state, anchor, buffers=weights.buffers)
    is_exact = all(each.is_lossless for each in plan.values())
    written, record, links, base = None, weights.as_anchor, (), None
    if any(each.uses_anchor for each in plan.values()):
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
            record = candidate.after_delta(_bits_per_weight(written, weights.state), moved, is_exact=is_exact)
            if isinstance(anchor, BaseWeights):
                files = anchor.files.values()
                keeps = candidate.keeps_base or (job.base is not None and job.base.is_kept_by(job.path, files))
                links, base = _keep_files(anchor, job.directory) if keeps else (), anchor.base
            else:
                links = anchor.files
                if not is_exact and weights.as_anchor and len(links) + 1 < _MOST_FILES:
                    record = replace(record, sha256="")  # this file is the next one's anchor
    if job.temporary and isinstance(anchor, Anchor) and not links:
        remove_files(anchor.files)  # where a checkpoint lies already, its new manifest does that
    return written and _Encoded(written, record, links, base)


def _keep_files(base: BaseWeights, directory: Path) -> tuple[Path, ...]:
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
                with replace_file(target, [file]) as copy:
                    for chunk in read_chunks(file):
                        copy.write(chunk)
        kept.append(target)
    return tuple(kept)


def _drift_rms(
    candidate: WeightsAnchor, job: SaveJob, weights: Weights, anchor: Anchor | BaseWeights
) -> dict[str, float]:
    """Measure how far the weights move between two saves, which takes as long as decoding the anchor.

    The steps of the lossy modes may not be coarser for a run that is old already: from the distance to a base they are
    taken as the share of the way that one interval between saves has, as if weights had drifted steadily. Weights that
    did not begin at the base have no entry, so they are exact.
    """
    distance_rms = measure_delta_rms(weights.state, anchor)
    if not any(distance_rms.values()):  # the anchor itself, made small once more, says nothing about drift
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


def _encode_full(job: SaveJob, weights: Weights, drift_rms: Mapping[str, float], file: Writable) -> _Encoded:
    """Encode without reference; where the mode is lossy, in steps as fine as those of the next delta are expected."""
    plan = job.policy.plan_weights(weights.state, buffers=weights.buffers)
    if any(each.steps_per_rms for each in plan.values()) and not drift_rms:
        of_optimizer = weights.optimizer, weights.optimizer_names, steps_since_last_save(job.path)
        drift_rms = expected_drift_rms(*of_optimizer, weights.optimizer_class)
    return _Encoded(encode_file(weights.state, with_steps(plan, drift_rms), file), weights.as_anchor)


def _bits_per_weight(written: EncodedFile, weights: Mapping[str, Any]) -> float:
    reports = [report for report in written.report if report.role == "weight"]
    elements = sum(weights[report.name].numel() for report in reports)
    return 8 * sum(report.bytes_out for report in reports) / max(elements, 1)


def save_new_directory(
    job: SaveJob,
    weights: Weights,
    trees: Mapping[str, tuple[Any, Plan]],
    *,
    as_they_are: Mapping[str, bytes] | None = None,
    **manifest_fields: Any,
) -> Manifest:
    """Save a missing or empty checkpoint directory; it appears whole or not at all.

    Others called `checkpoint-<step>` beside it may hold the anchor. `trees` are what else is to be stored and how, by
    file name; `as_they_are` files that are not encoded. UnstorableError names file and key.
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

    It is a difference to the run's anchor or base if there is one and no new one is due. Return the entries of these
    files, and what the manifest says of the anchor and the base that the next checkpoint may use. UnstorableError names
    file and key. ConfigError: there are no plain weights where the base should be.
    """
    candidate = encoded = None
    with job.open_file(weights.file_name) as file, _named_in_errors(weights.file_name):
        if job.anchor_every is not None:
            candidate = find_anchor_candidate(job, weights.file_name)
            if candidate is not None and not candidate.is_spent(job.anchor_every):
                encoded = _encode_delta(job, weights, candidate, file)
        if encoded is None:
            encoded = _encode_full(job, weights, candidate.step_rms if candidate else {}, file)
    written, record, links, base = encoded
    entry = _entry(file, written)
    entries = {link.name: FileEntry(link.stat().st_size, link.stem) for link in links}  # verified when opened
    anchor = record and asdict(replace(record, sha256=record.sha256 or entry.sha256))
    return {weights.file_name: entry, **entries}, {"anchor": anchor, "base": base}


def recorded_states(job: SaveJob, optimizer_class: str | None, entry: FileEntry) -> dict[str, Any]:
    """Return metadata about an optimizer whose states were saved: its class, and which of them were rounded."""
    is_lossy = job.policy.mode in LOSSY_MODES
    return {STATES_KEY: states_entry(optimizer_class, entry.report["tensors"], is_lossy=is_lossy)}


def save_tree(job: SaveJob, name: str, tree: Any, plan: Plan) -> FileEntry:
    """Save another file of a checkpoint, encoded; UnstorableError names the key, and what was there is still there."""
    with job.open_file(name) as file:
        written = encode_file(tree, plan, file)
    return _entry(file, written)


def _entry(file: DigestedFile, written: EncodedFile) -> FileEntry:
    report = {"anchor": written.anchor_sha256, "tensors": [dict(vars(tensor)) for tensor in written.report]}
    return FileEntry(file.size_bytes, file.sha256(), report)


@contextlib.contextmanager
def _named_in_errors(name: str) -> Iterator[None]:
    """Put the name of a file before the key that an `UnstorableError` of the block names."""
    try:
        yield
    except UnstorableError as error:
        raise UnstorableError(f"{name}: {error.where}", error.expected, error.found, error.next_step) from error
