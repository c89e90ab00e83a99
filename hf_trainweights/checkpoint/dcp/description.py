"""What the manifest of a sharded checkpoint says beside its files, so that no pickle has to be trusted.

That is all that `.metadata` says, DCP's index: a pickle, which may run any code. docs/sharded_format.md has the keys
of `sharded`, and those that a report of an item has beside those of `TensorReport`.

The name of a shard in an anchor is `model.embed.weight[0:256,0:128]`: a tensor that is cut otherwise has another name,
and therefore no reference.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from hf_trainweights.checkpoint.encoded.structure import TensorReport
from hf_trainweights.checkpoint.encoded.tree import DTYPES, corrupt
from hf_trainweights.checkpoint.manifest import FileEntry, Manifest
from hf_trainweights.errors import CorruptFileError

VERSION = 1

# A mesh of devices has fewer dimensions; with each, a shard has twice as many corners.
_MOST_CUT_DIMENSIONS = 8

_RANGE = re.compile(r"(0|[1-9]\d{0,17}):(0|[1-9]\d{0,17})")
_OBJECT = "object"
_TENSOR = re.compile(r"(\w+)\[((?:\d{1,18}(?:,\d{1,18})*)?)\]")


@dataclass(frozen=True)
class StoredFile:
    """A file of the checkpoint that one rank has written, and digests of the `anchors` that it refers to."""

    name: str
    size_bytes: int
    sha256: str
    is_anchor: bool = False
    anchors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """Where an item lies: a file of the checkpoint, the first byte in it and the one after the last.

    `crc32` is over these bytes; None in a plain checkpoint, because PyTorch keeps none.
    """

    file: str
    start: int
    stop: int
    crc32: int | None = None


@dataclass(frozen=True)
class StoredItem(WriteResult):
    """An item that one rank has written; `storage_data` is its `Place`.

    The manifest has its `row` (see above). `delta_rms` is how far the shard has moved from its anchor, where this save
    measured it. `elements` are those of the tensor, 0 for an object, or where it has the bytes of another item.
    """

    row: Mapping[str, Any] = field(default_factory=dict, compare=False)
    file: StoredFile = field(default=StoredFile("", 0, ""), compare=False)
    delta_rms: float | None = field(default=None, compare=False)
    elements: int = field(default=0, compare=False)


def stored_item(
    item: WriteItem,
    place: Place,
    report: TensorReport,
    *,
    anchor_sha256: str | None = None,
    delta_rms: float | None = None,
) -> StoredItem:
    """Return the result for DCP of an item whose file is not complete yet; `report` may have another path."""
    row: dict[str, Any] = {**vars(report), "path": item.index.fqn}
    row |= {"bytes": f"{place.start}:{place.stop}", "crc32": place.crc32}
    shard = shard_of(item)
    if shard is not None:
        row["shard"] = shard
    if anchor_sha256 is not None:
        row["anchor"] = anchor_sha256
    elements = math.prod(item.tensor_data.chunk.sizes) if item.tensor_data else 0
    return StoredItem(item.index, place.stop - place.start, place, row, delta_rms=delta_rms, elements=elements)


def describe(metadata: Metadata, anchor: Mapping[str, Any]) -> dict[str, Any]:
    """Return what goes into a manifest under `sharded`; `anchor` is what `ShardedAnchor.to_dict` returned."""
    keys = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    return {
        "version": VERSION,
        "tensors": {name: _tensor_text(value) for name, value in metadata.state_dict_metadata.items()},
        "keys": {name: json.dumps(list(path), separators=(",", ":")) for name, path in keys.items()},
        "anchor": anchor,
    }


def metadata_of(manifest: Manifest) -> Metadata:
    """Return DCP's metadata of a checkpoint, with a `Place` for each item.

    CorruptFileError: the manifest is not of a sharded checkpoint, of a newer version, or contradicts itself.
    """
    sharded = manifest.sharded
    if sharded.get("version") != VERSION:
        next_step = (
            "Upgrade hf_trainweights if the checkpoint is newer. FileSystemReader reads a plain one of "
            "torch.distributed.checkpoint, load_checkpoint one of a single process."
        )
        found = repr(sharded.get("version"))[:80] if sharded else "a checkpoint that is not sharded"
        raise CorruptFileError("sharded.version", f"version {VERSION}", found, next_step)
    tensors, keys = sharded.get("tensors"), sharded.get("keys")
    if type(tensors) is not dict or type(keys) is not dict:
        raise corrupt("sharded", "tensors and keys", sharded)
    shards: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
    places: dict[MetadataIndex, Place] = {}
    for name, entry in manifest.files.items():
        for number, row in enumerate(entry.report.get("tensors", ())):
            where = f"files[{name!r}].report.tensors[{number}]"
            index, shard = _index(where, row)
            places[index] = _place(where, name, entry, row)
            shards[index.fqn] += shard
    described = {name: _describe_one(name, text, shards[name]) for name, text in tensors.items()}
    _require_all(described, places)
    planner = {name: _keys(name, text) for name, text in keys.items()}
    return Metadata(described, planner or None, places, StorageMeta())


def _tensor_text(value: object) -> str:
    if not isinstance(value, TensorStorageMetadata):
        return _OBJECT
    dtype = str(value.properties.dtype).removeprefix("torch.")
    return f"{dtype}[{','.join(map(str, value.size))}]"


def _describe_one(name: str, text: object, shards: list[ChunkStorageMetadata]) -> Any:
    where = f"sharded.tensors[{name!r}]"
    match = _TENSOR.fullmatch(text) if type(text) is str else None
    if text == _OBJECT:
        return BytesStorageMetadata()
    if match is None or match[1] not in DTYPES:
        raise corrupt(where, "a dtype and a shape such as float32[2,3]", text)
    size = torch.Size(int(each) for each in match[2].split(",") if each)
    if not fill_whole(size, shards):
        found = [(list(shard.offsets), list(shard.sizes)) for shard in shards]
        raise corrupt(where, f"shards that together are {text}, none over another", found[:8])
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[match[1]]), size, shards)


def _index(where: str, row: Mapping[str, Any]) -> tuple[MetadataIndex, list[ChunkStorageMetadata]]:
    if "shard" not in row:
        return MetadataIndex(row["path"]), []
    if type(row["shard"]) is not str:
        raise corrupt(f"{where}.shard", "a slice such as 0:64,0:128", row["shard"])
    offsets, sizes = parse_shard(f"{where}.shard", row["shard"])
    return MetadataIndex(row["path"], offsets), [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))]


def _place(where: str, name: str, entry: FileEntry, row: Mapping[str, Any]) -> Place:
    text, crc32 = row.get("bytes"), row.get("crc32")
    if type(text) is not str or type(crc32) is not int:
        raise corrupt(where, "a range of bytes and their crc32", {"bytes": text, "crc32": crc32})
    start, stop = parse_range(f"{where}.bytes", text)
    if stop > entry.size_bytes:
        raise corrupt(f"{where}.bytes", f"a range within the {entry.size_bytes} bytes of {name}", text)
    return Place(name, start, stop, crc32)


def _require_all(described: Mapping[str, Any], places: Mapping[MetadataIndex, Place]) -> None:
    """Check that every item is of a tensor or object that is described, and every object has one."""
    for index in places:
        is_object = isinstance(described.get(index.fqn), BytesStorageMetadata)
        if index.fqn not in described or is_object != (index.offset is None):
            raise corrupt("sharded.tensors", f"an entry that fits the item {index.fqn}", None)
    for name, value in described.items():
        if isinstance(value, BytesStorageMetadata) and MetadataIndex(name) not in places:
            raise corrupt(f"sharded.tensors[{name!r}]", "one item of that object", "none")


def _keys(name: str, text: object) -> tuple[str | int, ...]:
    try:
        keys = json.loads(text) if type(text) is str else None
    except (ValueError, RecursionError):
        keys = None
    if type(keys) is not list or not all(type(key) in (str, int) for key in keys):
        raise corrupt(f"sharded.keys[{name!r}]", "strings and integers in a JSON array", text)
    return tuple(keys)


def parse_shard(where: str, text: str) -> tuple[list[int], list[int]]:
    """Return the offsets and sizes of a shard; CorruptFileError if `text` only pretends to be one."""
    ranges = [parse_range(where, part) for part in text.split(",")] if text else []
    return [start for start, _ in ranges], [stop - start for start, stop in ranges]


def parse_range(where: str, text: str) -> tuple[int, int]:
    """Return start and stop of a range such as `128:256`; CorruptFileError if it is none, or stops before it starts."""
    match = _RANGE.fullmatch(text)
    if match is None or int(match[2]) < int(match[1]):
        raise corrupt(where, "a range such as 0:64", text)
    return int(match[1]), int(match[2])


def shard_of(item: WriteItem) -> str | None:
    """Return which part of its tensor an item of a plan is; None for an object."""
    if item.tensor_data is None:
        return None
    chunk = item.tensor_data.chunk
    return ",".join(f"{start}:{start + size}" for start, size in zip(chunk.offsets, chunk.sizes, strict=True))


def shard_name(fqn: str, shard: str) -> str:
    """Return the name of a shard in an anchor."""
    return f"{fqn}[{shard}]"


def name_of(item: WriteItem) -> str:
    """Return the name of an item of a tensor in an anchor."""
    return shard_name(item.index.fqn, shard_of(item) or "")


def fill_whole(size: Sequence[int], shards: Iterable[ChunkStorageMetadata]) -> bool:
    """Return whether shards fill a tensor of that shape, no element twice; each of them is looked at once.

    Give the corners of a box the signs of a chess board. Where boxes lie side by side, the signs of the corners that
    meet add up to 0, so a filled box shows its own corners alone. Any overlap or hole leaves others.
    """
    boxes = [(shard.offsets, shard.sizes) for shard in shards]
    if any(len(offsets) != len(size) for offsets, _ in boxes):
        return False
    cut = [i for i, length in enumerate(size) if any((each[i], sizes[i]) != (0, length) for each, sizes in boxes)]
    if len(cut) > _MOST_CUT_DIMENSIONS:
        return False
    signs: Counter[tuple[int, ...]] = Counter()
    for sign, offsets, sizes in [*((1, *box) for box in boxes), (-1, [0] * len(size), size)]:
        if math.prod(sizes):
            ends = [((offsets[i], 1), (offsets[i] + sizes[i], -1)) for i in cut]
            for corner in itertools.product(*ends):
                signs[tuple(place for place, _ in corner)] += sign * math.prod(each for _, each in corner)
    return not any(signs.values())
