"""What a DCP directory holds, plain or encoded, read tensor by tensor in one process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from hf_trainweights.checkpoint.dcp.metadata import (
    ITEM_SUFFIX,
    METADATA_NAME,
    Place,
    metadata_of,
    read_plain_metadata,
)
from hf_trainweights.checkpoint.dcp.reader import read_bytes
from hf_trainweights.checkpoint.encoded.reader import find_anchor, load_item, register_anchor_directory
from hf_trainweights.checkpoint.encoded.structure import ANCHOR_SUFFIX, anchor_file_name
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from hf_trainweights.checkpoint.planning.roles import StateName, models, optimizer_states
from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.files.disk import is_old
from hf_trainweights.files.reading import file_sha256, open_regular_file

_MODEL_KEY = "model"

_NEXT_STEP = "Use another checkpoint, or restore this one from a copy."


def is_dcp_directory(path: Path) -> bool:
    """Return whether a directory holds a DCP checkpoint, or what an interrupted save left of one."""
    return path.is_dir() and ((path / METADATA_NAME).exists() or next(path.glob(f"*{ITEM_SUFFIX}"), None) is not None)


def dcp_directories(path: Path) -> list[Path]:
    """Return the DCP directories of a checkpoint, sorted: itself, or those that a Trainer wrote in it; else none."""
    if not path.is_dir():
        return []
    # The checkpoints of a run may be such directories, too.
    parts = (each for each in path.iterdir() if not each.name.startswith("checkpoint-"))
    return [path] if is_dcp_directory(path) else sorted(filter(is_dcp_directory, parts))


class ShardedContents:
    """The tensors and values in a DCP directory, by the names that DCP gave them; `manifest` is None in a plain one.

    ConfigError: the directory is none. CorruptFileError: its metadata are damaged or missing.
    """

    def __init__(self, directory: Path):
        if not is_dcp_directory(directory):
            next_step = "Pass the directory that torch.distributed.checkpoint wrote, or a Trainer's checkpoint."
            raise ConfigError(str(directory), f"a directory with {METADATA_NAME}", "none", next_step)
        self.directory = directory
        self.manifest, self.metadata = _read_metadata(directory)
        register_anchor_directory(directory)

    @property
    def places(self) -> Mapping[MetadataIndex, Any]:
        """Where each item lies: `file`, `start` and `stop`, in bytes."""
        return self.metadata.storage_data

    @property
    def files(self) -> list[str]:
        """The names of the files in which items lie, sorted."""
        return sorted({place.file for place in self.places.values()})

    @cached_property  # asked once for each name
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """The tensors by name; what else was saved is left out."""
        entries = self.metadata.state_dict_metadata
        return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}

    @cached_property
    def states(self) -> dict[str, StateName]:
        """The states and groups of optimizers, tensors or not, by name."""
        return optimizer_states(self.metadata.state_dict_metadata)

    def stored_bytes(self, name: str) -> int:
        """Return what the items of a tensor take on disk."""
        places = {self.places[MetadataIndex(name, chunk.offsets)] for chunk in self.tensors[name].chunks}
        return sum(place.stop - place.start for place in places)

    def require_complete(self) -> None:
        """Check that every item lies inside a file that is there, and that every anchor is found.

        Items are not read. CorruptFileError: one does not, or an anchor is damaged. MissingAnchorError: one is gone.
        """
        ends: dict[str, int] = defaultdict(int)
        for place in self.places.values():
            ends[place.file] = max(ends[place.file], place.stop)
        for name, end in ends.items():
            path = self.directory / name
            size_bytes = path.stat().st_size if path.is_file() else None
            if size_bytes is None or size_bytes < end:
                found = "no file" if size_bytes is None else f"{size_bytes} bytes"
                raise CorruptFileError(str(path), f"{end} bytes", found, _NEXT_STEP)
        for name, file in self.manifest.files.items() if self.manifest else ():
            if name == anchor_file_name(file.sha256):
                find_anchor(file.sha256, str(self.directory / name))

    def read_tensor(self, name: str) -> Tensor:
        """Read a whole tensor to the CPU, put together from the parts that the ranks saved."""
        entry = self.tensors[name]
        whole: Tensor | None = None
        for chunk in entry.chunks:
            part = self.read_item(MetadataIndex(name, chunk.offsets))
            if part.shape != chunk.sizes or part.dtype != entry.properties.dtype:
                expected = f"{entry.properties.dtype} of shape {tuple(chunk.sizes)}"
                found = f"{part.dtype} of shape {tuple(part.shape)}"
                raise CorruptFileError(f"{self.directory}, {name}", expected, found, _NEXT_STEP)
            if part.shape == entry.size:
                return part
            whole = torch.zeros(entry.size, dtype=part.dtype) if whole is None else whole
            corner = zip(chunk.offsets, chunk.sizes, strict=True)
            whole[tuple(slice(start, start + length) for start, length in corner)] = part
        return torch.zeros(entry.size, dtype=entry.properties.dtype) if whole is None else whole

    def read_item(self, index: MetadataIndex) -> Tensor:
        """Read the part of a tensor that one rank saved, one of `places`, to the CPU."""
        return read_tensor_at(self.directory, self.places[index], index.fqn)


def read_tensor_at(directory: Path, place: Place, name: str) -> Tensor:
    """Read the tensor of an item to the CPU; errors are those of `read_place`."""
    where = f"{directory / place.file}, {name}"
    value = load_item(read_place(directory, place), where)
    if not isinstance(value, Tensor):
        raise CorruptFileError(where, "a tensor", type(value).__name__, _NEXT_STEP)
    return value


def read_place(directory: Path, place: Place) -> bytes:
    """Read the bytes of an item; CorruptFileError if its file ends before, or holds others than were written."""
    path = directory / place.file
    with open_regular_file(path, follow_links=False) as file:
        return read_bytes(file, place, path)


def current_manifest(directory: Path) -> Manifest | None:
    """Return a DCP directory's manifest; None if it has none, or if a process died before `.metadata` followed."""
    if not (directory / MANIFEST_NAME).exists():
        return None
    manifest = read_manifest(directory)
    entry = manifest.files.get(METADATA_NAME)
    is_current = entry is not None and file_sha256(directory / METADATA_NAME) == entry.sha256
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


def model_weights(contents: ShardedContents) -> dict[str, str]:
    """Return the weights of the one model, or of the one under a key `model`: names in it to DCP's names.

    Empty if there are none, or several models and none is called `model`.
    """
    by_model = models(_weights(contents), contents.metadata.planner_data or {})
    named = [names for prefix, names in by_model.items() if prefix.rpartition(".")[2] == _MODEL_KEY]
    candidates = named or list(by_model.values())
    return candidates[0] if len(candidates) == 1 else {}


def all_weights(contents: ShardedContents) -> dict[str, str]:
    """Return what is no state of an optimizer, as `model_weights` does; by DCP's names where there is no one model."""
    names, of_model = _weights(contents), model_weights(contents)
    return of_model if len(of_model) == len(names) else {name: name for name in names}


def _weights(contents: ShardedContents) -> list[str]:
    return [name for name in contents.tensors if name not in contents.states]


def optimizer_tensors(contents: ShardedContents) -> dict[str, str]:
    """Return the states of optimizers: `state.<parameter>.<key>` to DCP's names."""
    states = contents.states
    return {f"state.{each.parameter}.{each.key}": name for name, each in states.items() if name in contents.tensors}


def trained_names(contents: ShardedContents) -> list[str]:
    """Return the names of parameters of which an optimizer keeps tensors, maybe several times."""
    return [state.parameter for name, state in contents.states.items() if name in contents.tensors]


def unlisted_files(directory: Path) -> list[Path]:
    """List the files of items that a DCP directory does not consist of, and the anchors that it does not need, sorted.

    None where it holds no whole checkpoint, since what is missing may be put back. Ranks on several machines hold no
    lock, so what is younger than a day may be of a save that still runs.
    """
    try:
        contents = ShardedContents(directory)
        contents.require_complete()
    except (CorruptFileError, OSError):
        return []
    listed = {*contents.files}
    unlisted = [path for path in directory.glob(f"__*{ITEM_SUFFIX}") if path.name not in listed]
    if contents.manifest is not None:  # without it only the items themselves know their anchors
        unlisted += [each for each in directory.glob(f"*{ANCHOR_SUFFIX}") if each.name not in contents.manifest.files]
    return sorted(filter(is_old, unlisted))
