"""Read the tensors and values of a DCP directory, plain or encoded, without executing a pickle.

`ShardedContents` reads tensor by tensor in one process. `TrainWeightsReader` serves `torch.distributed.checkpoint.load`
on all ranks. Items may be stored as differences from an anchor: weights of an earlier checkpoint, in a file that is
named by its digest. Items record where it lay. Readers also register the directory that they read, so that the anchor
is found if the run has moved.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from zlib_ng import zlib_ng

from hf_trainweights.checkpoint.dcp.metadata import ITEM_SUFFIX, METADATA_NAME, Place, metadata_of, read_plain_metadata
from hf_trainweights.checkpoint.encoded.reader import find_anchor, load_item, register_anchor_directory
from hf_trainweights.checkpoint.encoded.structure import anchor_file_name
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from hf_trainweights.checkpoint.planning.roles import StateName, models, optimizer_states
from hf_trainweights.errors import ConfigError, CorruptFileError, TrainWeightsError
from hf_trainweights.files.reading import check_member, file_sha256, open_regular_file

_MODEL_KEY = "model"

_NEXT_STEP = "Use another checkpoint, or restore this one from a copy."


def _is_dcp_directory(path: Path) -> bool:
    """Return whether a directory holds a DCP checkpoint, or files of one whose save was interrupted."""
    return path.is_dir() and ((path / METADATA_NAME).exists() or next(path.glob(f"*{ITEM_SUFFIX}"), None) is not None)


def dcp_directories(path: Path) -> list[Path]:
    """Return the DCP directories of a checkpoint, sorted: itself, or those that a Trainer wrote in it; may be empty."""
    if not path.is_dir():
        return []
    # If `path` is the directory of a run, its checkpoints may be DCP directories, which do not count.
    children = (child for child in path.iterdir() if not child.name.startswith("checkpoint-"))
    return [path] if _is_dcp_directory(path) else sorted(filter(_is_dcp_directory, children))


class ShardedContents:
    """The tensors and values in a DCP directory, by the names that DCP gave them; `manifest` is None in a plain one.

    ConfigError: it is no DCP directory. CorruptFileError: its metadata are damaged or missing.
    """

    def __init__(self, directory: Path):
        if not _is_dcp_directory(directory):
            next_step = "Pass the directory that torch.distributed.checkpoint wrote, or a Trainer's checkpoint."
            raise ConfigError(str(directory), f"a directory with {METADATA_NAME}", "none", next_step)
        self.directory = directory
        self.manifest, self.metadata = _read_metadata(directory)
        register_anchor_directory(directory)

    @property
    def places(self) -> Mapping[MetadataIndex, Any]:
        """The place of each item: `file`, `start` and `stop`, in bytes."""
        return self.metadata.storage_data

    @property
    def files(self) -> list[str]:
        """The names of the files that contain items, sorted."""
        return sorted({place.file for place in self.places.values()})

    @cached_property  # callers ask for it once for each name
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """The descriptions of the tensors by name, excluding other saved objects."""
        entries = self.metadata.state_dict_metadata
        return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}

    @cached_property
    def states(self) -> dict[str, StateName]:
        """The tensors that are states or settings of optimizers, by name."""
        states = optimizer_states(self.metadata.state_dict_metadata)
        return {name: state for name, state in states.items() if name in self.tensors}

    def model_weights(self) -> dict[str, str]:
        """Return the weights of the only model, or of the only one under a key `model`: names in it to DCP's names.

        Empty if there is no model, or if there are several and not exactly one has the key `model`.
        """
        by_model = models(self._weights(), self.metadata.planner_data or {})
        under_key = [names for prefix, names in by_model.items() if prefix.rpartition(".")[2] == _MODEL_KEY]
        candidates = under_key or list(by_model.values())
        return candidates[0] if len(candidates) == 1 else {}

    def all_weights(self) -> dict[str, str]:
        """Return all tensors but optimizer states in the same way; if they belong to several models, by DCP's names."""
        names, model_names = self._weights(), self.model_weights()
        return model_names if len(model_names) == len(names) else {name: name for name in names}

    def _weights(self) -> list[str]:
        return [name for name in self.tensors if name not in self.states]

    def optimizer_tensors(self) -> dict[str, str]:
        """Return the states of optimizers: `state.<parameter>.<key>` to DCP's names."""
        return {f"state.{state.parameter}.{state.key}": name for name, state in self.states.items()}

    def stored_bytes(self, name: str) -> int:
        """Return the bytes on disk of a tensor's items."""
        places = {self.places[MetadataIndex(name, chunk.offsets)] for chunk in self.tensors[name].chunks}
        return sum(place.stop - place.start for place in places)

    def require_complete(self) -> None:
        """Check that the files are there and long enough for all items, and that every anchor is found.

        Items are not read. CorruptFileError: a file is missing or too short, or an anchor is damaged.
        MissingAnchorError: an anchor is gone.
        """
        ends: dict[str, int] = defaultdict(int)
        for place in self.places.values():
            ends[place.file] = max(ends[place.file], place.stop)
        for name, end in ends.items():
            path = self.directory / name
            size_bytes = path.stat().st_size if path.is_file() else None
            if size_bytes is None or size_bytes < end:
                length = "no file" if size_bytes is None else f"{size_bytes} bytes"
                raise CorruptFileError(str(path), f"{end} bytes", length, _NEXT_STEP)
        for name, file in self.manifest.files.items() if self.manifest else ():
            if name == anchor_file_name(file.sha256):
                find_anchor(file.sha256, str(self.directory / name))

    def read_tensor(self, name: str) -> Tensor:
        """Read an unsharded tensor to the CPU, assembled from the shards that the ranks saved."""
        entry = self.tensors[name]
        unsharded: Tensor | None = None
        for chunk in entry.chunks:
            shard = self.read_item(MetadataIndex(name, chunk.offsets))
            if shard.shape != chunk.sizes or shard.dtype != entry.properties.dtype:
                expected = f"{entry.properties.dtype} of shape {tuple(chunk.sizes)}"
                content = f"{shard.dtype} of shape {tuple(shard.shape)}"
                raise CorruptFileError(f"{self.directory}, {name}", expected, content, _NEXT_STEP)
            if shard.shape == entry.size:
                return shard
            unsharded = torch.zeros(entry.size, dtype=shard.dtype) if unsharded is None else unsharded
            ranges = zip(chunk.offsets, chunk.sizes, strict=True)
            unsharded[tuple(slice(start, start + length) for start, length in ranges)] = shard
        return torch.zeros(entry.size, dtype=entry.properties.dtype) if unsharded is None else unsharded

    def read_item(self, index: MetadataIndex) -> Tensor:
        """Read one shard of a tensor, whose index is in `places`, to the CPU."""
        return read_tensor_at(self.directory, self.places[index], index.fqn)


def current_manifest(directory: Path) -> Manifest | None:
    """Return a DCP directory's manifest; None if it has none, or if a process died before it wrote `.metadata`."""
    if not (directory / MANIFEST_NAME).exists():
        return None
    manifest, metadata = read_manifest(directory), directory / METADATA_NAME
    entry = manifest.files.get(METADATA_NAME)
    is_current = entry is not None and metadata.exists() and file_sha256(metadata) == entry.sha256
    return manifest if is_current else None


def _read_metadata(directory: Path) -> tuple[Manifest | None, Metadata]:
    try:
        manifest = current_manifest(directory)
        if manifest is None or not manifest.sharded:
            return None, read_plain_metadata(directory)
        return manifest, metadata_of(manifest)
    except FileNotFoundError as error:
        next_step = "Its save was interrupted: use another checkpoint."
        raise CorruptFileError(
            str(directory), f"a {METADATA_NAME}, which is written last", "none", next_step
        ) from error


class TrainWeightsReader(StorageReader):
    """Reads checkpoints of `TrainWeightsWriter` for `torch.distributed.checkpoint.load`, on any number of ranks.

    DCP's own reader takes its metadata from the pickle `.metadata`. This one takes them from the manifest, whose digest
    it checks. It compares the length of each file and the CRC-32 of each item it reads. Errors are raised on every rank
    as DCP's `CheckpointException`, whose `failures` maps each rank that failed to its error and traceback:
    `error.failures[rank][0]` is one of `hf_trainweights.errors`.

    Args:
        path: The checkpoint.

    Examples:
        >>> import warnings, torch, torch.distributed.checkpoint as dcp
        >>> warnings.filterwarnings("ignore", "torch.distributed is .*uninitialized")  # one process, and we mean it
        >>> from hf_trainweights.distributed import TrainWeightsWriter
        >>> state = {"model": {"weight": torch.ones(3)}}
        >>> _ = dcp.save(state, storage_writer=TrainWeightsWriter("checkpoint-2"), no_dist=True)
        >>> loaded = {"model": {"weight": torch.zeros(3)}}
        >>> dcp.load(loaded, storage_reader=TrainWeightsReader("checkpoint-2"), no_dist=True)
        >>> loaded
        {'model': {'weight': tensor([1., 1., 1.])}}
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__()
        self._path = Path(path).absolute()
        self._places: dict[MetadataIndex, Place] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, from the path `checkpoint_id` if given; DCP calls it."""
        if checkpoint_id:
            self._path = Path(checkpoint_id).absolute()
        self._places = {}

    # If the signature had **kwargs, DCP would call it again after an error, for metadata of this rank alone.
    def read_metadata(self) -> Metadata:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the metadata in the manifest; if that cannot be read, an object that raises the error when it is used.

        DCP turns every error of this call into an AssertionError. Errors of later calls become its CheckpointException.
        """
        try:
            return metadata_of(read_sharded_manifest(self._path))
        except (TrainWeightsError, OSError) as error:
            return cast("Metadata", _UnreadableMetadata(error))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Store the places in the metadata that `read_metadata` returned; DCP calls it on every rank.

        Raises:
            CorruptFileError: The checkpoint is incomplete or damaged.
            OSError: The checkpoint is missing or cannot be read.
        """
        self._places = cast("dict[MetadataIndex, Place]", metadata.storage_data)
        register_anchor_directory(self._path)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is; DCP calls it on every rank."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are; DCP calls it on the coordinator."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a rank, each once and one at a time; DCP calls it on every rank.

        Raises:
            CorruptFileError: An item, or the anchor that it refers to, is damaged.
            MissingAnchorError: The anchor is gone.
            OSError: A file cannot be read.
        """
        items_by_file: dict[str, dict[Place, list[ReadItem]]] = defaultdict(lambda: defaultdict(list))
        for item in plan.items:
            stored = self._places[item.storage_index]
            items_by_file[stored.file][stored].append(item)
        for name, items_by_place in sorted(items_by_file.items()):
            path = self._path / name
            with open_regular_file(path, follow_links=False) as file:
                for stored, items in sorted(items_by_place.items(), key=lambda pair: pair[0].start):
                    _load_into_planner(planner, items, read_bytes(file, stored, path), path)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The path of the checkpoint."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a checkpoint can be there: at a path, not at a URL."""
        return "://" not in str(checkpoint_id)


def _load_into_planner(planner: LoadPlanner, items: Sequence[ReadItem], data: bytes, path: Path) -> None:
    """Decode the bytes of one stored item, and pass the planner all ranges of it that it asked for."""
    loaded = load_item(data, f"{path}, {items[0].storage_index.fqn}")
    for item in items:
        where = f"{path}, {item.storage_index.fqn}"
        if item.type == LoadItemType.BYTE_IO:
            # The planner unpickles these bytes without restriction, so it gets a pickle that this process made.
            saved_again = io.BytesIO()
            torch.save(loaded, saved_again)
            saved_again.seek(0)
            planner.load_bytes(item, saved_again)
            continue
        if not isinstance(loaded, Tensor):
            raise CorruptFileError(where, "a tensor", type(loaded).__name__, _NEXT_STEP)
        target, ranges = planner.resolve_tensor(item).detach(), zip(item.storage_offsets, item.lengths, strict=True)
        slices = tuple(slice(start, start + length) for start, length in ranges)
        source = loaded[slices] if len(slices) == loaded.dim() else loaded
        if source.size() != target.size():
            expected = f"the shard that the manifest names, {tuple(target.size())} at {tuple(item.storage_offsets)}"
            raise CorruptFileError(where, expected, f"one of shape {tuple(loaded.size())}", _NEXT_STEP)
        target.copy_(source)
        planner.commit_tensor(item, target)


def read_sharded_manifest(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint, and check that its files are there and have the recorded lengths.

    CorruptFileError: the save was interrupted, the manifest is damaged, or a file is missing or of another length.
    """
    if not (directory / METADATA_NAME).is_file():
        next_step = "Its save was interrupted, or it is another directory: use another checkpoint."
        raise CorruptFileError(str(directory), "a complete checkpoint", f"no {METADATA_NAME}", next_step)
    if not (directory / MANIFEST_NAME).exists():
        next_step = "If it is a plain checkpoint of torch.distributed.checkpoint, FileSystemReader reads it."
        raise CorruptFileError(str(directory), f"a checkpoint with {MANIFEST_NAME}", "none", next_step)
    manifest = read_manifest(directory)
    for name, entry in manifest.files.items():
        path = directory / name
        size_bytes = path.stat().st_size if path.is_file() else None
        # A killed save may not have replaced `.metadata`, and an anchor may be in another checkpoint of the run.
        is_missing_anchor = size_bytes is None and name == anchor_file_name(entry.sha256)
        if size_bytes != entry.size_bytes and name != METADATA_NAME and not is_missing_anchor:
            length = "no file" if size_bytes is None else f"{size_bytes} bytes"
            raise CorruptFileError(str(path), f"a file of {entry.size_bytes} bytes", length, _NEXT_STEP)
    return manifest


def read_tensor_at(directory: Path, place: Place, name: str) -> Tensor:
    """Read the tensor of an item to the CPU; raises the errors of `read_place`."""
    where = f"{directory / place.file}, {name}"
    value = load_item(read_place(directory, place), where)
    if not isinstance(value, Tensor):
        raise CorruptFileError(where, "a tensor", type(value).__name__, _NEXT_STEP)
    return value


def read_place(directory: Path, place: Place) -> bytes:
    """Read the bytes of an item; CorruptFileError: the file is too short, or the bytes are not as they were written."""
    path = directory / place.file
    with open_regular_file(path, follow_links=False) as file:
        return read_bytes(file, place, path)


def read_bytes(file: BinaryIO, place: Place, path: Path) -> bytes:
    """Read the bytes of an item, and check them with their CRC-32; in a plain checkpoint, with those in its zip."""
    where, size_bytes = f"{path}, from byte {place.start} on", place.stop - place.start
    file.seek(place.start)
    data = file.read(size_bytes)
    if len(data) != size_bytes:
        raise CorruptFileError(where, f"{size_bytes} bytes", f"{len(data)}", _NEXT_STEP)
    if place.crc32 is None:
        _require_intact_zip(data, where)
    elif (crc32 := zlib_ng.crc32(data)) != place.crc32:
        raise CorruptFileError(where, f"crc32 {place.crc32}", str(crc32), _NEXT_STEP)
    return data


def _require_intact_zip(data: bytes, where: str) -> None:
    """Check a file of torch.save with the checksums in it, which torch.load ignores."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for member in archive.infolist():
                check_member(archive, member)
    except (MemoryError, Warning):
        raise
    except Exception as error:  # zipfile raises anything on damaged archives
        problem = f"{type(error).__name__}: {error}"[:300]
        raise CorruptFileError(where, "a whole torch zip file", problem, _NEXT_STEP) from error


class _UnreadableMetadata:
    """Raises an error when any attribute is read.

    DCP's `load` catches every error of `read_metadata` and raises an AssertionError with its text instead. Errors of
    the calls that follow reach all ranks as they are.
    """

    def __init__(self, error: Exception):
        self._error = error

    def __getattr__(self, name: str) -> object:
        # Python calls this only for attributes that __init__ has not set. Its protocols ask for names like __len__.
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._error
