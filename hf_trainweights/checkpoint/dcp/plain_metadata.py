"""`.metadata` of a plain DCP directory, read without trusting it: PyTorch pickles it, and a pickle may call anything.

While the pickle is read, records that do nothing stand for PyTorch's classes. What they kept is checked, and only then
becomes PyTorch's `Metadata`. The private names of PyTorch's that its own reader needs there are in this module alone.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from hf_trainweights.checkpoint.dcp.description import Place, fill_whole
from hf_trainweights.checkpoint.encoded.tree import DTYPES
from hf_trainweights.errors import CorruptFileError, UnsupportedError
from hf_trainweights.files.reading import is_safe_name, open_regular_file

METADATA_NAME = ".metadata"
ITEM_SUFFIX = ".distcp"

_StorageInfo = getattr(filesystem, "_StorageInfo", None)
_DCP_VERSION = getattr(filesystem, "CURRENT_DCP_VERSION", None)

_MAX_METADATA_BYTES = 1 << 30  # a 70B model with AdamW on 64 ranks has 16 MB
_MAX_SHOWN = 200

_RECORDED = frozenset(
    {
        *(f"torch.distributed.checkpoint.metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta")),
        *(f"torch.distributed.checkpoint.metadata.{name}" for name in ("ChunkStorageMetadata", "TensorProperties")),
        *(f"torch.distributed.checkpoint.metadata.{name}StorageMetadata" for name in ("Tensor", "Bytes")),
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.Size",
        "torch.serialization._get_layout",
        *(f"{module}.{name}Path" for module in ("pathlib", "pathlib._local") for name in ("Posix", "Windows", "")),
    }
)


def read_plain_metadata(directory: Path) -> Metadata:
    """Read the `.metadata` of a DCP directory; nothing in it is executed. Its `storage_data` are `Place`.

    CorruptFileError: it is damaged, too large, contradicts itself, or names anything but DCP's own classes or files in
    the directory. FileNotFoundError: there is none.
    """
    path = directory / METADATA_NAME
    with open_regular_file(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > _MAX_METADATA_BYTES:
            raise _corrupt(path, f"at most {_MAX_METADATA_BYTES} bytes", f"{size_bytes}")
        content = file.read(size_bytes)
    try:
        return _metadata(_Unpickler(content).load())
    except CorruptFileError as error:
        raise _corrupt(path, error.expected, error.found) from error
    except MemoryError:
        raise
    except Exception as error:  # pickle raises anything on damaged bytes
        raise _corrupt(path, "the metadata of a DCP checkpoint", f"{type(error).__name__}: {error}") from error


class _Record:
    """Stands for an object of PyTorch: keeps what the pickle makes of it, and does nothing."""

    def __new__(cls, *args: Any) -> _Record:
        self = object.__new__(cls)
        self.args, self.state = args, {}
        return self

    args: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state


# The one in C keeps its memo as an array, which a file of 9 bytes makes as long as it likes.
class _Unpickler(pickle._Unpickler):
    def __init__(self, content: bytes):
        super().__init__(io.BytesIO(content))
        # Classes of their own for each file: a pickle may set attributes of a class that it names.
        self._records: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if full not in _RECORDED:
            raise _corrupt(full, "classes of torch.distributed.checkpoint alone", full)
        return self._records.setdefault(full, type(name, (_Record,), {}))


def _metadata(root: Any) -> Metadata:
    fields = _fields(root, "Metadata")
    places = {
        _index(index): _place(info) for index, info in _require(fields["storage_data"], dict, "storage_data").items()
    }
    tensors: dict[str, Any] = {}
    chunks = 0
    for name, value in _require(fields["state_dict_metadata"], dict, "state_dict_metadata").items():
        tensors[_require(name, str, "a name")] = entry = _entry(name, value)
        chunks += len(entry.chunks) if isinstance(entry, TensorStorageMetadata) else 1
        if chunks > len(places):  # a small pickle may refer to one long list many times
            raise _corrupt(name, f"{len(places)} chunks in all, as many as have a place", "more")
        _require_items(name, entry, places)
    planner = fields.get("planner_data") or {}
    paths = {
        _require(name, str, "a name"): tuple(_path(path))
        for name, path in _require(planner, dict, "planner_data").items()
    }
    version = fields.get("version")
    return Metadata(tensors, paths, places, StorageMeta(), version if isinstance(version, str) else None)


def _require_items(name: str, entry: Any, places: Mapping[MetadataIndex, Place]) -> None:
    """Check that each item of a name has a place, and that those of a tensor fill it."""
    items = {MetadataIndex(name)}
    if isinstance(entry, TensorStorageMetadata):
        if not fill_whole(entry.size, entry.chunks):
            found = f"{len(entry.chunks)} that leave a hole, or lie one over another"
            raise _corrupt(name, f"items of {name} that together are {tuple(entry.size)}", found)
        items = {MetadataIndex(name, chunk.offsets) for chunk in entry.chunks}
    if not places.keys() >= items:
        raise _corrupt(name, f"a place for each item of {name}", "none of one")


def _entry(name: str, value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if _is(value, "BytesStorageMetadata"):
        return BytesStorageMetadata()
    fields = _fields(value, "TensorStorageMetadata")
    properties = fields["properties"]
    # TensorProperties keeps a tuple that begins with the dtype.
    dtype = properties.state[0] if _is(properties, "TensorProperties") and properties.state else None
    if not isinstance(dtype, torch.dtype):
        raise _corrupt(name, "a dtype", repr(dtype))
    size = _size(fields["size"])
    chunks = []
    for chunk in _require(fields["chunks"], list, "chunks"):
        parts = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _size(parts["offsets"]), _size(parts["sizes"])
        if len(offsets) != len(sizes):
            raise _corrupt(name, f"as many sizes as the {len(offsets)} offsets", f"{len(sizes)}")
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _index(value: Any) -> MetadataIndex:
    fields = _fields(value, "MetadataIndex")
    offset = fields.get("offset")
    return MetadataIndex(_require(fields["fqn"], str, "a name"), None if offset is None else _size(offset))


def _place(value: Any) -> Place:
    fields = _fields(value, "_StorageInfo")
    name = _require(fields["relative_path"], str, "relative_path")
    if "/" in name or not is_safe_name(name):
        raise _corrupt("relative_path", "names of files in the directory", repr(name))
    if fields.get("transform_descriptors"):
        raise _corrupt(name, "items without a transformation of another package", repr(fields["transform_descriptors"]))
    offset, length = (_natural(fields[key]) for key in ("offset", "length"))
    return Place(name, offset, offset + length)


def _path(value: Any) -> Iterator[str | int]:
    for part in _require(value, tuple, "a path of keys"):
        if not isinstance(part, str | int):
            raise _corrupt("planner_data", "keys of strings and numbers", repr(part))
        yield part


def _size(value: Any) -> torch.Size:
    if not _is(value, "Size") or len(value.args) != 1:
        raise _corrupt("a size", "a torch.Size", repr(value))
    return torch.Size([_natural(each) for each in _require(value.args[0], tuple, "a size")])


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise _corrupt("a number", "0 or more", repr(value))
    return value


def _is(value: Any, name: str) -> bool:
    return isinstance(value, _Record) and type(value).__name__ == name


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    if not _is(value, name) or not isinstance(value.state, dict):
        raise _corrupt("an object", name, repr(value))
    return value.state


def _require(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind):
        raise _corrupt(where, kind.__name__, repr(value))
    return value


def _corrupt(where: str | Path, expected: str, found: str) -> CorruptFileError:
    next_step = "Use another checkpoint, or restore this one from a copy; PyTorch's own reader would execute it."
    return CorruptFileError(str(where), expected, found[:_MAX_SHOWN], next_step)


def stock_metadata(metadata: Metadata, places: dict[MetadataIndex, tuple[str, int, int]], save_id: str) -> Metadata:
    """Change metadata so that a stock `FileSystemReader` finds the items: file, first byte and length of each."""
    if _StorageInfo is None:
        expected = "torch.distributed.checkpoint.filesystem._StorageInfo"
        raise UnsupportedError("TrainWeightsWriter", expected, "none", "Use a version of torch from 2.8 to 2.13.")
    info: Any = _StorageInfo
    metadata.storage_data = {index: info(*place) for index, place in places.items()}
    metadata.storage_meta = StorageMeta(save_id=save_id)
    if _DCP_VERSION is not None:
        metadata.version = _DCP_VERSION
    return metadata
