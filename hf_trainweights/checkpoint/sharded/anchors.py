"""The anchors of a sharded checkpoint: one file per rank that wrote weights, each found by the shards that it holds."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hf_trainweights.checkpoint.dcp.plain_metadata import METADATA_NAME
from hf_trainweights.checkpoint.encoded.decoder import Anchor
from hf_trainweights.checkpoint.encoded.structure import anchor_file_name
from hf_trainweights.checkpoint.encoded.tree import corrupt
from hf_trainweights.checkpoint.manifest import Manifest, read_manifest
from hf_trainweights.checkpoint.run.anchors import AnchorCandidate, AnchorRecord, link_anchor
from hf_trainweights.errors import CorruptFileError

NO_DIGEST = "0" * 64


@dataclass(frozen=True, kw_only=True)
class ShardedAnchor(AnchorCandidate):
    """What a checkpoint says about the anchors that the next one may use; in its record `sha256` says nothing.

    `files` are the names of shards, and `paths` where the file lies, by digest of each anchor file.
    """

    files: Mapping[str, tuple[str, ...]]
    paths: Mapping[str, Path] = field(default_factory=dict)

    @cached_property
    def shards(self) -> dict[str, str]:
        """The digest of the file that holds each shard."""
        return {name: sha256 for sha256, names in self.files.items() for name in names}

    def part(self, names: Collection[str]) -> ShardedAnchor:
        """Return what it says about some shards: no rank needs to know those of all others."""
        files: dict[str, list[str]] = defaultdict(list)
        for name in names:
            if name in self.shards:
                files[self.shards[name]].append(name)
        rms = self.record.delta_rms
        record = replace(self.record, delta_rms={name: rms[name] for name in names if name in rms})
        return replace(self, record=record, files=dict(files), paths={sha256: self.paths[sha256] for sha256 in files})

    def open(self, names: Iterable[str], directory: Path) -> dict[str, Anchor]:
        """Link the anchors of some shards into a checkpoint, and return by name those that are whole."""
        needed = {name: self.shards[name] for name in names if name in self.shards}
        opened = {each: link_anchor(self.paths[each], each, directory) for each in sorted(set(needed.values()))}
        return {name: anchor for name, sha256 in needed.items() if (anchor := opened[sha256]) is not None}

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        fields = {name: value for name, value in asdict(self.record).items() if name != "sha256"}
        return {**fields, "files": {sha256: list(names) for sha256, names in self.files.items()}}

    @classmethod
    def from_dict(cls, value: Any) -> ShardedAnchor:
        """Read what `to_dict` returned; CorruptFileError if a field is missing, unknown or of another type."""
        if type(value) is not dict or type(value.get("files")) is not dict:
            raise corrupt("sharded.anchor", "an object with files", value)
        for sha256, names in value["files"].items():
            if type(names) is not list or not all(type(name) is str for name in names):
                raise corrupt("sharded.anchor.files", "digests to names of shards", {sha256: names})
        fields = {name: content for name, content in value.items() if name != "files"}
        record = AnchorRecord.from_dict({"sha256": NO_DIGEST, **fields})
        return cls(record=record, files={sha256: tuple(names) for sha256, names in value["files"].items()})


def find_sharded_anchor(directory: Path, step: int | None) -> ShardedAnchor | None:
    """Return the anchors of a checkpoint for the one at `step`; None, with a warning, if none of them can be used."""
    try:
        if not (directory / METADATA_NAME).is_file():
            raise FileNotFoundError(f"{directory} holds no {METADATA_NAME}")
        manifest = read_manifest(directory)
        anchor = ShardedAnchor.from_dict(manifest.sharded.get("anchor"))
        paths = {sha256: _path(directory, manifest, sha256) for sha256 in anchor.files}
    except (CorruptFileError, OSError) as error:
        warnings.warn(f"The checkpoint is stored without reference: {error}", stacklevel=2)
        return None
    interval = None if step is None or manifest.step is None else step - manifest.step
    interval = interval if interval is not None and interval > 0 else None
    return replace(anchor, paths=paths, interval_steps=interval)


def _path(directory: Path, manifest: Manifest, sha256: str) -> Path:
    names = [name for name, entry in manifest.files.items() if entry.sha256 == sha256]
    found = [directory / name for name in names if (directory / name).is_file()]
    if not found:
        raise FileNotFoundError(f"{directory} does not hold the anchor {anchor_file_name(sha256)}")
    return found[0]
