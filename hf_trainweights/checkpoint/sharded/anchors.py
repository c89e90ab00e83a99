"""The anchors of a sharded checkpoint: one file per rank that wrote weights, each found by the shards that it holds.

A manifest records in `sharded.anchor` the fields of an `AnchorRecord` but `sha256`, `delta_rms` by the names of shards,
and instead `files`: the digest of each anchor to the names of the shards in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_trainweights.checkpoint.dcp.torch_names import METADATA_NAME
from hf_trainweights.checkpoint.encoded.anchor import Anchor
from hf_trainweights.checkpoint.encoded.anchor_files import anchor_file_name
from hf_trainweights.checkpoint.encoded.key_paths import corrupt
from hf_trainweights.checkpoint.manifest.manifest import Manifest, read_manifest
from hf_trainweights.checkpoint.run.anchors import AnchorRecord
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.atomic import link_or_copy

_NO_DIGEST = "0" * 64


@dataclass(frozen=True)
class ShardedAnchor:
    """What a checkpoint says about the anchors that the next one may use.

    Args:
        record: As for a checkpoint of one process, but `delta_rms` has the names of shards, and `sha256` says nothing.
        files: Digest of each anchor file to the names of the shards in it.
        paths: Digest to where the file lies.
        interval_steps: Training steps from that checkpoint to the next one; None where unknown.
    """

    record: AnchorRecord
    files: Mapping[str, tuple[str, ...]]
    paths: Mapping[str, Path] = field(default_factory=dict)
    interval_steps: int | None = None

    @property
    def step_rms(self) -> dict[str, float]:
        """By shard the rms from which the lossy codecs take the next steps; empty before the first difference."""
        return self.record.step_rms(self.interval_steps)

    @property
    def shards(self) -> dict[str, str]:
        """The digest of the file that holds each shard."""
        return {name: sha256 for sha256, names in self.files.items() for name in names}

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        fields = {name: value for name, value in self.record.to_dict().items() if name != "sha256"}
        return {**fields, "files": {sha256: list(names) for sha256, names in self.files.items()}}

    @classmethod
    def from_dict(cls, value: Any) -> ShardedAnchor:
        """Read what `to_dict` returned; CorruptFileError if a field is missing, unknown or of another type."""
        if type(value) is not dict or type(value.get("files")) is not dict:
            raise corrupt("sharded.anchor", "an object with files", value)
        for sha256, names in value["files"].items():
            is_digest = len(sha256) == 64 and not set(sha256) - set("0123456789abcdef")
            if not is_digest or type(names) is not list or not all(type(name) is str for name in names):
                raise corrupt("sharded.anchor.files", "digests to names of shards", {sha256: names})
        fields = {name: content for name, content in value.items() if name != "files"}
        record = AnchorRecord.from_dict({"sha256": _NO_DIGEST, **fields})
        return cls(record, {sha256: tuple(names) for sha256, names in value["files"].items()})


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
    return dataclasses.replace(anchor, paths=paths, interval_steps=interval)


def _path(directory: Path, manifest: Manifest, sha256: str) -> Path:
    names = [name for name, entry in manifest.files.items() if entry.sha256 == sha256]
    found = [directory / name for name in names if (directory / name).is_file()]
    if not found:
        raise FileNotFoundError(f"{directory} does not hold the anchor {anchor_file_name(sha256)}")
    return found[0]


class OpenAnchors:
    """The anchors that one rank stores its shards against, linked into its checkpoint when they are first asked for.

    Args:
        anchor: The anchors.
        directory: The checkpoint that is being written.
    """

    def __init__(self, anchor: ShardedAnchor, directory: Path):
        self._anchor = anchor
        self._directory = directory
        self._shards = anchor.shards
        self._open: dict[str, Anchor | None] = {}
        self.step_rms = anchor.step_rms

    def find(self, name: str) -> Anchor | None:
        """Return the anchor that holds a shard; None, with a warning, if it is damaged or gone."""
        sha256 = self._shards.get(name)
        if sha256 is not None and sha256 not in self._open:
            self._open[sha256] = self._link(sha256)
        return self._open[sha256] if sha256 else None

    def digests(self) -> tuple[str, ...]:
        """Return the digests of all that `find` returned."""
        return tuple(sorted(sha256 for sha256, anchor in self._open.items() if anchor is not None))

    def _link(self, sha256: str) -> Anchor | None:
        link = self._directory / anchor_file_name(sha256)
        try:
            if not link.exists():
                with contextlib.suppress(FileExistsError):  # another rank was faster
                    link_or_copy(self._anchor.paths[sha256], link)
            return Anchor(link)
        except (CorruptFileError, FileNotFoundError) as error:
            warnings.warn(f"Some shards are stored without reference: {error}", stacklevel=2)
            return None


def next_anchor(
    previous: ShardedAnchor | None,
    full: Mapping[str, Iterable[str]],
    used: Iterable[str],
    measured: Mapping[str, float],
    bits_per_weight: float,
    *,
    is_exact: bool = False,
) -> ShardedAnchor:
    """Return what a new checkpoint says about anchors.

    `previous` is what it was stored against (None for a full one), of which it links the digests in `used`. `full` has
    the names of the shards in each of its own anchors, `measured` how far shards have moved, where this save measured
    it. `is_exact` says that no weight may be rounded.
    """
    files = {sha256: tuple(names) for sha256, names in full.items()}
    kept = {sha256: previous.files[sha256] for sha256 in used} if previous else {}
    if previous is None or not kept:
        return ShardedAnchor(AnchorRecord(_NO_DIGEST), files)
    record = previous.record
    fineness = record.fineness(previous.interval_steps)
    following = record.after_delta(bits_per_weight, fineness, is_exact=is_exact)
    # The anchor itself, made small once more, says nothing about how far weights move.
    if any(measured.values()) and not (is_exact and record.delta_rms):
        following = dataclasses.replace(following, delta_rms={**record.delta_rms, **measured})
    if not record.delta_rms:
        following = dataclasses.replace(following, interval_steps=previous.interval_steps)
    return ShardedAnchor(following, kept | files)
