"""A new checkpoint directory: written aside and renamed into place, so that it appears whole or not at all.

| file | what |
|---|---|
| `pytorch_model.bin`, `adapter_model.bin` | weights, a flat state dict under module names; encoded |
| `optimizer.pt` and other torch files | any tree; encoded |
| `model.torchscript.pt` | a model that runs without this package; as TorchScript wrote it |
| `<sha256>.anchor` | hard link to weights that reading these weights takes, or what is kept of a base |
| `trainweights.json` | the manifest, written last |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_trainweights.checkpoint.encoded.base_identity import Base
from hf_trainweights.checkpoint.encoded.encoder import WrittenFile, write_file
from hf_trainweights.checkpoint.encoded.plan import Plan
from hf_trainweights.checkpoint.manifest.manifest import FileEntry, Manifest, write_manifest
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.run.anchors import AnchorRecord
from hf_trainweights.checkpoint.run.save_job import BaseChoice, SaveJob, file_named_in_errors
from hf_trainweights.checkpoint.whole.weights_encoder import Weights, encode_weights
from hf_trainweights.files.atomic import create_directory
from hf_trainweights.files.save_errors import save_errors
from hf_trainweights.files.sha256 import DigestedFile


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
        job = SaveJob.aside(path, temporary, policy, anchor_every, base)
        saved = save_weights(job, weights)
        files = saved.files
        for name, (tree, plan) in trees.items():
            with file_named_in_errors(name):
                files[name] = save_tree(job, name, tree, plan)
        for name, content in (as_they_are or {}).items():
            with job.open_file(temporary / name) as file:
                digested = DigestedFile(file)
                digested.write(content)
            files[name] = FileEntry(digested.size_bytes, digested.sha256())
        record = saved.anchor and saved.anchor.to_dict()
        manifest = Manifest(files, policy.mode, anchor=record, base=saved.base, **manifest_fields)
        write_manifest(temporary, manifest)
    return manifest


@dataclass(frozen=True)
class SavedWeights:
    """The weights of a checkpoint on the disk, and what its manifest says of them.

    Args:
        files: Manifest entries of the files written.
        anchor: What it records about the anchor that the next checkpoint may use.
        base: The weights outside the run that this anchor is; None if it is a file of the run.
    """

    files: dict[str, FileEntry]
    anchor: AnchorRecord | None
    base: Base | None = None


def save_weights(job: SaveJob, weights: Weights) -> SavedWeights:
    """Save the weights file of a checkpoint, and beside it links to the anchors that it needs.

    UnstorableError names file and key. ConfigError: there are no plain weights where the base should be.
    """
    with job.open_file(job.directory / weights.file_name) as file, file_named_in_errors(weights.file_name):
        digested = DigestedFile(file)
        encoded = encode_weights(job, weights, digested)
    entry = _entry(digested, encoded.written)
    links = {link.name: FileEntry(link.stat().st_size, link.stem) for link in encoded.links}  # verified when opened
    record = encoded.anchor
    if record is None:
        record = AnchorRecord(entry.sha256) if weights.can_be_anchor else None
    elif encoded.is_next_anchor:
        record = replace(record, sha256=entry.sha256)
    return SavedWeights({weights.file_name: entry, **links}, record, encoded.base)


def save_tree(job: SaveJob, name: str, tree: Any, plan: Plan) -> FileEntry:
    """Save another file of a checkpoint, encoded; UnstorableError names the key, and what was there is still there."""
    with job.open_file(job.directory / name) as file:
        digested = DigestedFile(file)
        written = write_file(digested, tree, plan)
    return _entry(digested, written)


def _entry(digested: DigestedFile, written: WrittenFile) -> FileEntry:
    report = {"anchor": written.anchor_sha256, "tensors": [dict(vars(tensor)) for tensor in written.report]}
    return FileEntry(digested.size_bytes, digested.sha256(), report)
