"""The two indices of a sharded checkpoint: the manifest, which records the anchors, and `.metadata`.

A save writes them last, and the next save reads them first. A save gives its files names that were free. So an older
checkpoint in the same directory stays intact until both indices have been replaced, one after the other. Then the files
that neither index lists are removed.

Each rank that wrote weights has one anchor file. The manifest lists the shards in each file. The name of a shard is
`model.embed.weight[0:256,0:128]`: a tensor that is cut differently has other names, and therefore no reference.
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from hf_trainweights.checkpoint.dcp.metadata import ITEM_SUFFIX, METADATA_NAME, VERSION, Place, entry_text
from hf_trainweights.checkpoint.encoded.encoder import TensorReport
from hf_trainweights.checkpoint.encoded.structure import ANCHOR_SUFFIX, anchor_file_name
from hf_trainweights.checkpoint.encoded.tree import corrupt
from hf_trainweights.checkpoint.manifest import FileEntry, Manifest, read_manifest, write_manifest
from hf_trainweights.checkpoint.run.anchors import AnchorRecord
from hf_trainweights.errors import CorruptFileError, UnsupportedError
from hf_trainweights.files.atomic import remove_files, replace_file
from hf_trainweights.files.reading import is_sha256

# Private names of PyTorch, whose own reader needs them to find items.
_StorageInfo = getattr(filesystem, "_StorageInfo", None)
_DCP_VERSION = getattr(filesystem, "CURRENT_DCP_VERSION", None)

_ITEM_FILE = re.compile(rf"__\d+_(\d+){re.escape(ITEM_SUFFIX)}")
_NO_DIGEST = "0" * 64


@dataclass(frozen=True)
class StoredFile:
    """A file of the checkpoint that one rank has written, with the digests of all `anchors` that reading it takes."""

    name: str
    entry: FileEntry
    is_anchor: bool = False
    anchors: tuple[str, ...] = ()


@dataclass(frozen=True)
class StoredItem(WriteResult):
    """An item that one rank has written; `storage_data` is its `Place`.

    `row` describes it in the manifest. `elements` is the number of elements in the shard, 0 for an object and for a
    weight that is tied to another. `delta_rms` is the rms of its difference to the anchor, if this save measured it.
    """

    row: Mapping[str, Any] = field(default_factory=dict, compare=False)
    file: StoredFile = field(default=StoredFile("", FileEntry(0, "")), compare=False)
    elements: int = field(default=0, compare=False)
    delta_rms: float | None = field(default=None, compare=False)


def stored_item(item: WriteItem, place: Place, report: TensorReport, anchor_sha256: str | None = None) -> StoredItem:
    """Return DCP's result for an item whose file is not complete yet; the path in `report` is replaced.

    `anchor_sha256` is the digest of the anchor that the item is a difference to, or None.
    """
    row: dict[str, Any] = {**vars(report), "path": item.index.fqn}
    row |= {"bytes": f"{place.start}:{place.stop}", "crc32": place.crc32}
    elements = 0
    if item.tensor_data is not None:
        row["shard"] = _shard_of(item)
        elements = math.prod(item.tensor_data.chunk.sizes)
    if anchor_sha256 is not None:
        row["anchor"] = anchor_sha256
    return StoredItem(item.index, place.stop - place.start, place, row, elements=elements)


def name_of(item: WriteItem) -> str:
    """Return the name of a tensor's item in an anchor file."""
    return f"{item.index.fqn}[{_shard_of(item)}]"


def _shard_of(item: WriteItem) -> str:
    assert item.tensor_data is not None  # an object has no shards
    chunk = item.tensor_data.chunk
    return ",".join(f"{start}:{start + size}" for start, size in zip(chunk.offsets, chunk.sizes, strict=True))


@dataclass(frozen=True, kw_only=True)
class ShardedAnchor:
    """The anchor files that the next checkpoint may use, as a checkpoint records them; `record.sha256` is unused.

    `interval_steps` are the training steps from the last save to the next one; None if unknown. `shards` maps
    the name of each shard to the digest of its anchor file, and `paths` maps that to the file's path.
    """

    record: AnchorRecord
    shards: Mapping[str, str]
    paths: Mapping[str, Path] = field(default_factory=dict)
    interval_steps: int | None = None

    def files(self, names: Iterable[str]) -> dict[str, tuple[str, Path]]:
        """Return the digest and path of the anchor file of each of these shards, by its name."""
        return {name: (self.shards[name], self.paths[self.shards[name]]) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """Return the record and the anchor files as JSON."""
        files: dict[str, list[str]] = defaultdict(list)
        for name, sha256 in self.shards.items():
            files[sha256].append(name)
        fields = {name: value for name, value in asdict(self.record).items() if name != "sha256"}
        return {**fields, "files": files}

    @classmethod
    def from_dict(cls, value: Any) -> ShardedAnchor:
        """Read the JSON of `to_dict`; CorruptFileError: a field is missing, unknown or of another type."""
        if type(value) is not dict or type(value.get("files")) is not dict:
            raise corrupt("sharded.anchor", "an object with files", value)
        for sha256, names in value["files"].items():
            if not is_sha256(sha256) or type(names) is not list or not all(type(name) is str for name in names):
                raise corrupt("sharded.anchor.files", "digests to names of shards", {sha256: names})
        fields = {name: content for name, content in value.items() if name != "files"}
        record = AnchorRecord.from_dict({"sha256": _NO_DIGEST, **fields})
        return cls(record=record, shards={name: sha256 for sha256, names in value["files"].items() for name in names})


def find_sharded_anchor(directory: Path, step: int | None) -> ShardedAnchor | None:
    """Return the anchors in a checkpoint for the next one, at `step`. If they cannot be used, warn and return None."""
    try:
        if not (directory / METADATA_NAME).is_file():
            raise FileNotFoundError(f"{directory} holds no {METADATA_NAME}")
        manifest = read_manifest(directory)
        anchor = ShardedAnchor.from_dict(manifest.sharded.get("anchor"))
        names = {entry.sha256: name for name, entry in manifest.files.items()}
        digests = sorted(set(anchor.shards.values()))
        paths = {sha256: directory / names.get(sha256, anchor_file_name(sha256)) for sha256 in digests}
        for sha256, path in paths.items():
            if not path.is_file():
                raise FileNotFoundError(f"{directory} does not hold the anchor {anchor_file_name(sha256)}")
    except (CorruptFileError, OSError) as error:
        warnings.warn(f"The checkpoint is stored without reference: {error}", stacklevel=2)
        return None
    interval = None if step is None or manifest.step is None else step - manifest.step
    interval = interval if interval is not None and interval > 0 else None
    return replace(anchor, paths=paths, interval_steps=interval)


def free_number(directory: Path) -> int:
    """Return the lowest even number such that no name `__<rank>_<number>.distcp` has it or its successor."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    numbers = {int(match[1]) // 2 for name in names if (match := _ITEM_FILE.fullmatch(name))}
    return next(2 * number for number in range(len(numbers) + 1) if number not in numbers)


def file_names(rank: int, number: int) -> tuple[str, str]:
    """Return the names of a rank's files, for weights and for everything else; `number` comes from `free_number`."""
    return f"__{rank}_{number}{ITEM_SUFFIX}", f"__{rank}_{number + 1}{ITEM_SUFFIX}"


def commit(
    directory: Path,
    dcp_metadata: Metadata,
    results: Sequence[Sequence[WriteResult]],
    save_id: str,
    anchor: ShardedAnchor | None = None,
    is_exact: bool = False,
    **manifest_fields: Any,
) -> None:
    """Complete a checkpoint: write both indices of the files that all ranks have written, and remove older files.

    `results` has a list of `StoredItem` for each rank. Weights are stored against `anchor`, and none of them is rounded
    if `is_exact` is true. ConfigError: fields of the manifest (mode, step, metadata, ...) hold something that JSON
    cannot. OSError: writing failed, and the older checkpoint is intact.
    """
    items = [item for rank_results in results for item in rank_results if isinstance(item, StoredItem)]
    pickled = pickled_metadata(dcp_metadata, {item.index: item.storage_data for item in items}, save_id)
    files = {item.file.name: item.file.entry for item in items}
    for sha256 in sorted({sha256 for item in items for sha256 in item.file.anchors}):
        link = directory / anchor_file_name(sha256)
        files[link.name] = FileEntry(link.stat().st_size, sha256)  # its digest was verified when it was opened
    files[METADATA_NAME] = FileEntry(len(pickled), hashlib.sha256(pickled).hexdigest())
    record = _anchor_of(items, anchor, is_exact)
    write_manifest(directory, Manifest(files, sharded=_describe(dcp_metadata, record), **manifest_fields))
    with replace_file(directory / METADATA_NAME) as file:
        file.write(pickled)
    # Remove the files of earlier saves, and of saves that were killed.
    present = [*directory.glob(f"__*{ITEM_SUFFIX}"), *directory.glob(f"*{ANCHOR_SUFFIX}")]
    remove_files(sorted(path for path in present if path.name not in files))


def pickled_metadata(metadata: Metadata, places: Mapping[MetadataIndex, Place], save_id: str) -> bytes:
    """Set the metadata's fields so that a stock `FileSystemReader` finds the items, and return its pickle."""
    if _StorageInfo is None:
        expected = "torch.distributed.checkpoint.filesystem._StorageInfo"
        raise UnsupportedError("TrainWeightsWriter", expected, "none", "Use a version of torch from 2.8 to 2.15.")
    info: Any = _StorageInfo
    metadata.storage_data = {
        index: info(place.file, place.start, place.stop - place.start) for index, place in places.items()
    }
    metadata.storage_meta = StorageMeta(save_id=save_id)
    if _DCP_VERSION is not None:
        metadata.version = _DCP_VERSION
    return pickle.dumps(metadata)


def _describe(metadata: Metadata, anchor: ShardedAnchor) -> dict[str, Any]:
    """Return the field `sharded` of a manifest."""
    keys = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    return {
        "version": VERSION,
        "tensors": {name: entry_text(entry) for name, entry in metadata.state_dict_metadata.items()},
        "keys": {name: json.dumps(list(path), separators=(",", ":")) for name, path in keys.items()},
        "anchor": anchor.to_dict(),
    }


def _anchor_of(items: Sequence[StoredItem], previous: ShardedAnchor | None, is_exact: bool) -> ShardedAnchor:
    """Return the anchors that the next checkpoint may use, for the manifest of this one."""
    bits = elements = 0
    measured, new_shards = {}, {}
    for item in items:
        if "shard" not in item.row:
            continue
        name = f"{item.index.fqn}[{item.row['shard']}]"
        if item.file.is_anchor:
            new_shards[name] = item.file.entry.sha256
        if item.delta_rms is not None:
            measured[name] = item.delta_rms
        if item.row["role"] == "weight":
            bits += 8 * item.row["bytes_out"]
            elements += item.elements
    used = {sha256 for item in items for sha256 in item.file.anchors}
    if previous is None or not used:
        return ShardedAnchor(record=AnchorRecord(_NO_DIGEST), shards=new_shards)
    moved = measured if any(measured.values()) else {}  # the anchor itself was compressed again: that shows no drift
    bits_per_weight, interval_steps = bits / max(elements, 1), previous.interval_steps
    record = previous.record.after_delta(bits_per_weight, moved, interval_steps, is_exact=is_exact)
    old_shards = {name: sha256 for name, sha256 in previous.shards.items() if sha256 in used}
    return ShardedAnchor(record=record, shards=old_shards | new_shards)
