"""DCP's metadata of a directory, which lists its tensors and their places: from the manifest, or from `.metadata`.

The manifest has all facts that `.metadata` has, so that no pickle has to be trusted. docs/sharded_format.md lists the
keys of `sharded`, and the keys that the report of an item has in addition to those of `TensorReport`.

In a plain directory `.metadata` is read without trusting it. PyTorch pickles it, and a pickle may call anything. So
while the pickle is read, records without behaviour stand for PyTorch's classes. Their contents are checked, and only
then become `Metadata`.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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

from hf_trainweights.checkpoint.encoded.tree import DTYPES, corrupt
from hf_trainweights.checkpoint.manifest import FileEntry, Manifest
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.reading import is_safe_name, open_regular_file

METADATA_NAME = ".metadata"
ITEM_SUFFIX = ".distcp"
VERSION = 1
"""The version of the field `sharded` of a manifest."""

# Real meshes of devices have fewer dimensions. The limit bounds the work, as each one doubles the corners of a shard.
_MOST_CUT_DIMENSIONS = 8

_RANGE = re.compile(r"(0|[1-9]\d{0,17}):(0|[1-9]\d{0,17})")
_OBJECT = "object"
_TENSOR = re.compile(r"(\w+)\[((?:\d{1,18}(?:,\d{1,18})*)?)\]")

_MAX_METADATA_BYTES = 1 << 30  # a 70B model with AdamW on 64 ranks has 16 MB

# The names that a pickle may use: all names in these modules, and two functions. A record stands for each of them, so
# neither the classes nor the functions are called.
_RECORDED_MODULES = frozenset(
    {*(f"torch.distributed.checkpoint.{name}" for name in ("metadata", "filesystem")), "pathlib", "pathlib._local"}
)
_RECORDED_FUNCTIONS = frozenset({"torch.Size", "torch.serialization._get_layout"})

Entry = TensorStorageMetadata | BytesStorageMetadata
"""The description of a name: dtype, shape and shards of a tensor; an object's description has no fields."""


@dataclass(frozen=True)
class Place:
    """The place of an item: a file of the checkpoint, the item's first byte in it, and the one after its last byte.

    `crc32` is the checksum of these bytes; None in a plain checkpoint, because PyTorch stores no checksum.
    """

    file: str
    start: int
    stop: int
    crc32: int | None = None


def metadata_of(manifest: Manifest) -> Metadata:
    """Return DCP's metadata of a checkpoint, with a `Place` for each item.

    CorruptFileError: the manifest is not that of a sharded checkpoint, has a newer version, or contradicts itself.
    """
    sharded = manifest.sharded
    if sharded.get("version") != VERSION:
        next_step = (
            "Upgrade hf_trainweights if the checkpoint is newer. FileSystemReader reads a plain one of "
            "torch.distributed.checkpoint, load_checkpoint one of a single process."
        )
        version = repr(sharded.get("version"))[:80] if sharded else "a checkpoint that is not sharded"
        raise CorruptFileError("sharded.version", f"version {VERSION}", version, next_step)
    tensors, keys = sharded.get("tensors"), sharded.get("keys")
    if type(tensors) is not dict or type(keys) is not dict:
        raise corrupt("sharded", "tensors and keys", sharded)
    shards: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
    places: dict[MetadataIndex, Place] = {}
    for name, entry in manifest.files.items():
        for number, row in enumerate(entry.report.get("tensors", ())):
            where, offsets = f"files[{name!r}].report.tensors[{number}]", None
            if "shard" in row:
                shard = _parse_shard(f"{where}.shard", row["shard"])
                shards[row["path"]].append(shard)
                offsets = shard.offsets
            places[MetadataIndex(row["path"], offsets)] = _parse_place(where, name, entry, row)
    entries = {name: _parse_entry(name, text, shards[name]) for name, text in tensors.items()}
    planner = {name: _parse_keys(name, text) for name, text in keys.items()}
    return _checked(Metadata(entries, planner or None, places, StorageMeta()))


def entry_text(entry: Entry) -> str:
    """Return the text that describes a tensor or object in a manifest, such as `float32[2,3]`."""
    if isinstance(entry, BytesStorageMetadata):
        return _OBJECT
    dtype = str(entry.properties.dtype).removeprefix("torch.")
    return f"{dtype}[{','.join(map(str, entry.size))}]"


def _parse_entry(name: str, text: object, shards: list[ChunkStorageMetadata]) -> Entry:
    match = _TENSOR.fullmatch(text) if type(text) is str else None
    if text == _OBJECT:
        return BytesStorageMetadata()
    if match is None or match[1] not in DTYPES:
        raise corrupt(f"sharded.tensors[{name!r}]", "a dtype and a shape such as float32[2,3]", text)
    size = torch.Size(int(length) for length in match[2].split(",") if length)
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[match[1]]), size, shards)


def _parse_place(where: str, name: str, entry: FileEntry, row: Mapping[str, Any]) -> Place:
    text, crc32 = row.get("bytes"), row.get("crc32")
    if type(text) is not str or type(crc32) is not int:
        raise corrupt(where, "a range of bytes and their crc32", {"bytes": text, "crc32": crc32})
    start, stop = _parse_range(f"{where}.bytes", text)
    if stop > entry.size_bytes:
        raise corrupt(f"{where}.bytes", f"a range within the {entry.size_bytes} bytes of {name}", text)
    return Place(name, start, stop, crc32)


def _parse_keys(name: str, text: object) -> tuple[str | int, ...]:
    try:
        keys = json.loads(text) if type(text) is str else None
    except (ValueError, RecursionError):
        keys = None
    if type(keys) is not list or not all(type(key) in (str, int) for key in keys):
        raise corrupt(f"sharded.keys[{name!r}]", "strings and integers in a JSON array", text)
    return tuple(keys)


def _parse_shard(where: str, text: object) -> ChunkStorageMetadata:
    if type(text) is not str:
        raise corrupt(where, "a slice such as 0:64,0:128", text)
    ranges = [_parse_range(where, rows) for rows in text.split(",")] if text else []
    sizes = torch.Size([stop - start for start, stop in ranges])
    return ChunkStorageMetadata(torch.Size([start for start, _ in ranges]), sizes)


def _parse_range(where: str, text: str) -> tuple[int, int]:
    match = _RANGE.fullmatch(text)
    if match is None or int(match[2]) < int(match[1]):
        raise corrupt(where, "a range such as 0:64", text)
    return int(match[1]), int(match[2])


def read_plain_metadata(directory: Path) -> Metadata:
    """Read the `.metadata` of a DCP directory without executing it; the values of its `storage_data` are `Place`.

    CorruptFileError: the file is damaged, too large, contradicts itself, or names other classes than DCP's own or files
    outside the directory. FileNotFoundError: there is no such file.
    """
    path = directory / METADATA_NAME
    next_step = "Use another checkpoint, or restore this one from a copy; PyTorch's own reader would execute it."
    with open_regular_file(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > _MAX_METADATA_BYTES:
            raise CorruptFileError(str(path), f"at most {_MAX_METADATA_BYTES} bytes", f"{size_bytes}", next_step)
        content = file.read(size_bytes)
    try:
        return _unpickled_metadata(_Unpickler(content).load())
    except CorruptFileError as error:
        raise CorruptFileError(str(path), error.expected, error.found, next_step) from error
    except (MemoryError, Warning):
        raise
    except Exception as error:  # pickle raises anything on damaged bytes
        problem = f"{type(error).__name__}: {error}"[:200]
        raise CorruptFileError(str(path), "the metadata of a DCP checkpoint", problem, next_step) from error


class _Record:
    """Stands for an object of PyTorch: stores the arguments and state from the pickle, and has no behaviour."""

    def __new__(cls, *args: Any) -> _Record:
        self = object.__new__(cls)
        self.args, self.state = args, {}
        return self

    args: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state


# The unpickler in C keeps its memo as an array, and a file of 9 bytes can make that array as long as it likes.
class _Unpickler(pickle._Unpickler):
    def __init__(self, content: bytes):
        super().__init__(io.BytesIO(content))
        # Each file gets classes of its own, because a pickle may set attributes of a class that it names.
        self._records: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        is_recorded = module in _RECORDED_MODULES or full in _RECORDED_FUNCTIONS
        _require(is_recorded, "classes of torch.distributed.checkpoint alone", full)
        return self._records.setdefault(full, type(name, (_Record,), {}))


def _unpickled_metadata(root: Any) -> Metadata:
    fields = _fields(root, "Metadata")
    places = {_index(index): _place(info) for index, info in _typed(dict, fields["storage_data"]).items()}
    entries: dict[str, Entry] = {}
    chunks = 0
    for name, value in _typed(dict, fields["state_dict_metadata"]).items():
        entries[_typed(str, name)] = entry = _entry(value)
        chunks += len(entry.chunks) if isinstance(entry, TensorStorageMetadata) else 1
        # A small pickle may refer to one long list many times.
        _require(chunks <= len(places), f"{len(places)} chunks in all, as many as have a place", "more")
    paths: dict[str, tuple[str | int, ...]] = {}
    for name, path in _typed(dict, fields.get("planner_data") or {}).items():
        paths[_typed(str, name)] = _typed(tuple, path)
        _require(all(isinstance(key, str | int) for key in path), "keys of strings and numbers", path)
    version = fields.get("version")
    return _checked(Metadata(entries, paths, places, StorageMeta(), version if isinstance(version, str) else None))


def _entry(value: Any) -> Entry:
    if _is(value, "BytesStorageMetadata"):
        return BytesStorageMetadata()
    fields = _fields(value, "TensorStorageMetadata")
    properties = fields["properties"]
    # The pickled state of TensorProperties is a tuple that begins with the dtype.
    state = properties.state if _is(properties, "TensorProperties") else None
    dtype = _typed(torch.dtype, state[0] if state else None)
    chunks = []
    for chunk in _typed(list, fields["chunks"]):
        corner = _fields(chunk, "ChunkStorageMetadata")
        chunks.append(ChunkStorageMetadata(_size(corner["offsets"]), _size(corner["sizes"])))
    return TensorStorageMetadata(TensorProperties(dtype=dtype), _size(fields["size"]), chunks)


def _index(value: Any) -> MetadataIndex:
    fields = _fields(value, "MetadataIndex")
    offset = fields.get("offset")
    return MetadataIndex(_typed(str, fields["fqn"]), None if offset is None else _size(offset))


def _place(value: Any) -> Place:
    fields = _fields(value, "_StorageInfo")
    name, transformations = _typed(str, fields["relative_path"]), fields.get("transform_descriptors")
    _require("/" not in name and is_safe_name(name), "names of files in the directory", name)
    _require(not transformations, "items without a transformation of another package", transformations)
    offset, length = (_natural(fields[key]) for key in ("offset", "length"))
    return Place(name, offset, offset + length)


def _size(value: Any) -> torch.Size:
    _require(_is(value, "Size") and len(value.args) == 1, "a torch.Size", value)
    return torch.Size([_natural(length) for length in _typed(tuple, value.args[0])])


def _natural(value: Any) -> int:
    _require(type(value) is int and 0 <= value < 1 << 63, "0 or more", value)
    return value


def _is(value: Any, name: str) -> bool:
    return isinstance(value, _Record) and type(value).__name__ == name


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    _require(_is(value, name) and isinstance(value.state, dict), name, value)
    return value.state


def _typed(kind: type, value: Any) -> Any:
    _require(isinstance(value, kind), kind.__name__, value)
    return value


def _require(fits: bool, expected: str, found: object) -> None:
    if not fits:
        raise corrupt(METADATA_NAME, expected, repr(found))


def _checked(metadata: Metadata) -> Metadata:
    """Return metadata after checking that shards fill each tensor, and that each item is described and has a place."""
    items: list[MetadataIndex] = []
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            items.append(MetadataIndex(name))
            continue
        if not fill_whole(entry.size, entry.chunks):
            shards = [(list(shard.offsets), list(shard.sizes)) for shard in entry.chunks[:8]]
            expected = f"shards that together are {entry_text(entry)}, none over another"
            raise corrupt(f"sharded.tensors[{name!r}]", expected, f"those of {name}: {shards}")
        items += [MetadataIndex(name, shard.offsets) for shard in entry.chunks]
    described, places = set(items), metadata.storage_data or {}
    for index in places:
        if index not in described:
            raise corrupt("sharded.tensors", f"an entry that fits the item {index.fqn}", None)
    for index in items:
        if index not in places:
            raise corrupt(f"sharded.tensors[{index.fqn!r}]", "one item of that object or shard", f"none of {index.fqn}")
    return metadata


def fill_whole(size: Sequence[int], shards: Iterable[ChunkStorageMetadata]) -> bool:
    """Return whether shards fill a tensor of that shape without overlap, in time proportional to their number.

    Each shard is a box, and its corners get alternating signs like the fields of a chess board. At a point where boxes
    meet, the signs of their corners add up to 0. So boxes that fill the tensor leave the corners of the tensor alone.
    Any overlap or hole leaves other corners.
    """
    boxes = [(shard.offsets, shard.sizes) for shard in shards]
    if any(len(offsets) != len(size) or len(sizes) != len(size) for offsets, sizes in boxes):
        return False
    cut = [i for i, length in enumerate(size) if any((start[i], sizes[i]) != (0, length) for start, sizes in boxes)]
    if len(cut) > _MOST_CUT_DIMENSIONS:
        return False
    signs: Counter[tuple[int, ...]] = Counter()
    for sign, offsets, sizes in [*((1, *box) for box in boxes), (-1, [0] * len(size), size)]:
        if math.prod(sizes):
            ends = [((offsets[i], 1), (offsets[i] + sizes[i], -1)) for i in cut]
            for corner in itertools.product(*ends):
                signs[tuple(end for end, _ in corner)] += sign * math.prod(end_sign for _, end_sign in corner)
    return not any(signs.values())
