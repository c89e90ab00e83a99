"""`TrainWeightsReader`: loads sharded checkpoints without executing a pickle, and checks what it reads."""

from __future__ import annotations

import io
import os
import zipfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from zlib_ng import zlib_ng

from hf_trainweights.checkpoint.dcp.metadata import METADATA_NAME, Place, metadata_of
from hf_trainweights.checkpoint.encoded.reader import load_item, register_anchor_directory
from hf_trainweights.checkpoint.encoded.structure import anchor_file_name
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from hf_trainweights.errors import CorruptFileError, TrainWeightsError
from hf_trainweights.files.reading import check_member, open_regular_file

_NEXT_STEP = "Use another checkpoint, or restore this one from a copy."


class TrainWeightsReader(StorageReader):
    """Reads for `torch.distributed.checkpoint.load` what `TrainWeightsWriter` wrote, on any number of ranks.

    What DCP's own reader takes from the pickle `.metadata`, this one takes from the manifest, whose digest it checks.
    It compares the length of each file and the CRC-32 of each item that it reads. Errors are raised on every rank as
    DCP's `CheckpointException`, whose `failures` maps each rank that failed to its error and traceback:
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
        """Begin another load, from another path if one is given; DCP calls it."""
        if checkpoint_id:
            self._path = Path(checkpoint_id).absolute()
        self._places = {}

    # DCP would ask a signature with **kwargs a second time after an error, for metadata of the rank alone.
    def read_metadata(self) -> Metadata:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return what the manifest says; where it cannot be read, an object that raises the error when it is used.

        DCP turns every error of this call into an AssertionError, and those of the next one into its own.
        """
        try:
            return metadata_of(read_sharded_manifest(self._path))
        except (TrainWeightsError, OSError) as error:
            return cast("Metadata", UnreadableMetadata(error))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take what `read_metadata` returned; DCP calls it on every rank.

        Raises:
            CorruptFileError: The checkpoint is incomplete or damaged.
            OSError: It is missing or cannot be read.
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
            MissingAnchorError: The anchor is found nowhere.
            OSError: A file cannot be read.
        """
        items_of: dict[str, dict[Place, list[ReadItem]]] = defaultdict(lambda: defaultdict(list))
        for item in plan.items:
            place = self._places[item.storage_index]
            items_of[place.file][place].append(item)
        for name, places in sorted(items_of.items()):
            with open_regular_file(self._path / name, follow_links=False) as file:
                for place in sorted(places, key=lambda each: each.start):
                    where = f"{self._path / name}, {places[place][0].storage_index.fqn}"
                    _give(planner, places[place], read_bytes(file, place, self._path / name), where)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where the checkpoint lies."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a checkpoint can lie there: at a path, not at a URL."""
        return "://" not in str(checkpoint_id)


def _give(planner: LoadPlanner, items: Iterable[ReadItem], data: bytes, where: str) -> None:
    """Give the planner all that it wants of one item's bytes."""
    loaded = load_item(data, where)
    for item in items:
        if item.type == LoadItemType.BYTE_IO:
            saved_again = io.BytesIO()  # because the planner loads these bytes without any restriction
            torch.save(loaded, saved_again)
            saved_again.seek(0)
            planner.load_bytes(item, saved_again)
            continue
        if not isinstance(loaded, Tensor):
            raise CorruptFileError(where, "a tensor", type(loaded).__name__, _NEXT_STEP)
        target, ranges = planner.resolve_tensor(item).detach(), zip(item.storage_offsets, item.lengths, strict=True)
        wanted = tuple(slice(start, start + length) for start, length in ranges)
        part = loaded[wanted] if len(wanted) == loaded.dim() else loaded
        if part.size() != target.size():
            expected = f"the shard that the manifest names, {tuple(target.size())} at {tuple(item.storage_offsets)}"
            raise CorruptFileError(where, expected, f"one of shape {tuple(loaded.size())}", _NEXT_STEP)
        target.copy_(part)
        planner.commit_tensor(item, target)


def read_sharded_manifest(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint that is complete, as far as the names and lengths of its files show.

    CorruptFileError: its save was interrupted, the manifest is damaged, or a file is missing or of another length.
    """
    if not (directory / METADATA_NAME).is_file():
        found = f"no {METADATA_NAME}"
        next_step = "Its save was interrupted, or it is another directory: use another checkpoint."
        raise CorruptFileError(str(directory), "a complete checkpoint", found, next_step)
    if not (directory / MANIFEST_NAME).exists():
        next_step = "If it is a plain checkpoint of torch.distributed.checkpoint, FileSystemReader reads it."
        raise CorruptFileError(str(directory), f"a checkpoint with {MANIFEST_NAME}", "none", next_step)
    manifest = read_manifest(directory)
    for name, entry in manifest.files.items():
        path = directory / name
        size_bytes = path.stat().st_size if path.is_file() else None
        # A killed save may not have replaced the one, and the other may lie in another checkpoint of the run.
        is_missing_anchor = size_bytes is None and name == anchor_file_name(entry.sha256)
        if size_bytes != entry.size_bytes and name != METADATA_NAME and not is_missing_anchor:
            found = "no file" if size_bytes is None else f"{size_bytes} bytes"
            raise CorruptFileError(str(path), f"a file of {entry.size_bytes} bytes", found, _NEXT_STEP)
    return manifest


def read_bytes(file: BinaryIO, place: Place, path: Path) -> bytes:
    """Read the bytes of an item, and compare them with their CRC-32, or where none is known with those in the item."""
    where, size_bytes = f"{path}, from byte {place.start} on", place.stop - place.start
    file.seek(place.start)
    data = file.read(size_bytes)
    if len(data) != size_bytes:
        raise CorruptFileError(where, f"{size_bytes} bytes", f"{len(data)}", _NEXT_STEP)
    if place.crc32 is None:
        _require_whole_zip(data, where)
    elif (found := zlib_ng.crc32(data)) != place.crc32:
        raise CorruptFileError(where, f"crc32 {place.crc32}", str(found), _NEXT_STEP)
    return data


def _require_whole_zip(data: bytes, where: str) -> None:
    """Compare what torch.save wrote with the checksums in it, which torch.load leaves alone."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for member in archive.infolist():
                check_member(archive, member)
    except MemoryError:
        raise
    except Exception as error:  # zipfile raises anything on damaged archives
        found = f"{type(error).__name__}: {error}"[:300]
        raise CorruptFileError(where, "a whole torch zip file", found, _NEXT_STEP) from error


class UnreadableMetadata:
    """Raises an error when anything is asked of it.

    DCP's `load` catches every error of `read_metadata` and raises an AssertionError with its text instead. Errors of
    the calls that follow reach all ranks as they are.
    """

    def __init__(self, error: Exception):
        self._error = error

    def __getattr__(self, name: str) -> object:
        # What __init__ sets is found before this is called; Python's own protocols ask for names of this kind.
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._error
