"""`.metadata` of a plain DCP directory: all that PyTorch reads from it, and nothing in it is executed."""

from __future__ import annotations

import os
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint.sharded_states import sample_state, save_plain
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from hf_trainweights.checkpoint.dcp.metadata import entry_text, read_plain_metadata
from hf_trainweights.errors import CorruptFileError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_plain(sample_state(), tmp_path)
    return tmp_path


class Calls:
    """An object whose pickle calls a function."""

    def __init__(self, function: Any, *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def write(directory: Path, metadata: Any) -> None:
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def stock(directory: Path) -> Metadata:
    return dcp.FileSystemReader(directory).read_metadata()


def described(metadata: Metadata) -> dict[str, object]:
    """Return dtype, shape and shards of each tensor; from 2.15 on PyTorch keeps strides too, which no reader needs."""
    entries = metadata.state_dict_metadata
    return {name: (entry_text(entry), getattr(entry, "chunks", None)) for name, entry in entries.items()}


def test_metadata_are_those_that_pytorch_reads(directory: Path) -> None:
    ours, expected = read_plain_metadata(directory), stock(directory)
    assert described(ours) == described(expected)
    assert ours.planner_data == expected.planner_data
    places = {index: (info.relative_path, info.offset, info.length) for index, info in expected.storage_data.items()}
    assert {i: (place.file, place.start, place.stop - place.start) for i, place in ours.storage_data.items()} == places


@pytest.mark.slow
@pytest.mark.parametrize("where", ["whole", "version", "fqn", "planner"])
def test_no_function_is_called_wherever_it_stands(directory: Path, where: str) -> None:
    mark = directory / "called"
    call, metadata = Calls(os.mkdir, str(mark)), stock(directory)
    if where == "version":
        metadata.version = call
    if where == "fqn":
        metadata.state_dict_metadata[call] = metadata.state_dict_metadata.popitem()[1]
    if where == "planner":
        metadata.planner_data = call
    write(directory, call if where == "whole" else metadata)
    with pytest.raises(CorruptFileError, match=r"\.metadata: expected classes of torch.distributed.checkpoint alone"):
        read_plain_metadata(directory)
    assert not mark.exists()


def test_classes_of_pytorch_stay_as_they_are_whatever_a_file_sets_in_them(directory: Path) -> None:
    # The opcodes of: Metadata.state_dict_metadata = "poisoned", by the second half of a state.
    poison = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}U\x13state_dict_metadataU\x08poisonedstb."
    (directory / ".metadata").write_bytes(b"\x80\x02" + poison)
    with pytest.raises(CorruptFileError, match=r"\.metadata: expected"):
        read_plain_metadata(directory)
    assert getattr(Metadata, "state_dict_metadata", None) != "poisoned"


def test_a_file_of_a_few_bytes_takes_no_more_memory_than_it_needs(directory: Path) -> None:
    # None, kept in the memo under the number 2**24.
    (directory / ".metadata").write_bytes(b"\x80\x04Nr" + struct.pack("<I", 1 << 24) + b".")
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFileError, match=r"\.metadata: expected Metadata, found None"):
            read_plain_metadata(directory)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("length", [0, 1, 100, 1000])
def test_a_file_that_is_cut_short_is_called_damaged(directory: Path, length: int) -> None:
    path = directory / ".metadata"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CorruptFileError, match=r"\.metadata: expected"):
        read_plain_metadata(directory)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", ""])
def test_items_lie_in_files_of_the_directory_alone(directory: Path, name: str) -> None:
    metadata = stock(directory)
    for info in metadata.storage_data.values():
        info.relative_path = name
    write(directory, metadata)
    with pytest.raises(CorruptFileError, match="expected names of files in the directory"):
        read_plain_metadata(directory)


def change_length(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).length = -1


def change_chunk(metadata: Metadata) -> None:
    entry: Any = metadata.state_dict_metadata["model.embed.weight"]
    entry.chunks[0] = ChunkStorageMetadata(torch.Size([0, 10**9]), torch.Size([64, 64]))


def repeat_chunks(metadata: Metadata) -> None:
    entry: Any = metadata.state_dict_metadata["model.embed.weight"]
    entry.chunks = [entry.chunks[0]] * 1000


def transform(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]


def replace_place(metadata: Metadata) -> None:
    metadata.storage_data[next(iter(metadata.storage_data))] = MetadataIndex("a")


def leave_hole(metadata: Metadata) -> None:
    entry: Any = metadata.state_dict_metadata["model.embed.weight"]
    entry.size = torch.Size([entry.size[0] + 1, entry.size[1]])


def lose_place(metadata: Metadata) -> None:
    del metadata.storage_data[next(index for index in metadata.storage_data if index.fqn == "model.embed.weight")]


def lose_entry(metadata: Metadata) -> None:
    del metadata.state_dict_metadata["model.embed.weight"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [change_length, change_chunk, repeat_chunks, leave_hole, lose_place, lose_entry, transform, replace_place],
)
def test_metadata_that_contradict_themselves_are_called_damaged(directory: Path, change: Any) -> None:
    metadata = stock(directory)
    change(metadata)
    write(directory, metadata)
    with pytest.raises(CorruptFileError, match=r"\.metadata: expected"):
        read_plain_metadata(directory)


def test_the_class_that_pytorch_keeps_private_is_where_it_is_looked_for() -> None:
    assert filesystem._StorageInfo.__module__ == "torch.distributed.checkpoint.filesystem"
