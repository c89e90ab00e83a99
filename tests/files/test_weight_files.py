"""Weight files are told by their names, and so is which of them a loader opens first."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.weight_files import (
    ENTRY_POINTS,
    bin_name,
    entry_point_rank,
    is_read_by_loaders,
    is_weight_file,
    shard_names,
)


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("model.safetensors", None),
        ("model-00001-of-00002.safetensors", None),
        ("model.safetensors.index.json", None),
        ("pytorch_model.bin", None),
        ("pytorch_model-00002-of-00002.bin", None),
        ("pytorch_model.bin.index.json", None),
        ("model.fp16.safetensors", "fp16"),
        ("model.fp16-00001-of-00002.safetensors", "fp16"),
        ("model.safetensors.index.fp16.json", "fp16"),
        ("pytorch_model.fp16.bin", "fp16"),
        ("pytorch_model.bin.index.fp16.json", "fp16"),
    ],
)
def test_weight_files_belong_to_one_variant(name: str, variant: str | None) -> None:
    assert is_weight_file(name, variant)
    assert not is_weight_file(name, "fp16" if variant is None else None)
    assert not is_weight_file(name, "int8")


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "training_args.bin",
        "my_model.safetensors",
        "adapter_model.safetensors",
        "model-1-of-2.safetensors",
    ],
)
def test_other_files_are_not_weight_files(name: str) -> None:
    assert not is_weight_file(name)


@pytest.mark.parametrize(("rank", "name"), list(enumerate(ENTRY_POINTS)))
def test_entry_points_rank_in_the_order_of_the_loaders(rank: int, name: str) -> None:
    assert entry_point_rank(name) == rank


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("model.fp16.safetensors", "model.safetensors"),
        ("model.safetensors.index.fp16.json", "model.safetensors.index.json"),
        ("pytorch_model.fp16.bin", "pytorch_model.bin"),
        ("pytorch_model.bin.index.fp16.json", "pytorch_model.bin.index.json"),
    ],
)
def test_a_variant_ranks_as_the_plain_file(name: str, plain: str) -> None:
    assert entry_point_rank(name) == entry_point_rank(plain) is not None


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "config.json", "optimizer.bin", "model.fp16"])
def test_shards_and_other_files_are_no_entry_points(name: str) -> None:
    assert entry_point_rank(name) is None


@pytest.mark.parametrize("name", ["README.md", "trainweights_files.json", "trainweights_files.fp16.json"])
def test_cards_and_digests_change_nothing_for_a_loader(name: str) -> None:
    assert not is_read_by_loaders(name)
    assert is_read_by_loaders(name + ".txt")


def test_every_safetensors_name_has_a_bin_twin() -> None:
    names = ["model.safetensors", "model.safetensors.index.json", "model.v-00001-of-00002.safetensors"]
    twins = ["pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model.v-00001-of-00002.bin"]
    assert [bin_name(name) for name in names] == twins
    assert all(is_weight_file(name, "v" if ".v" in name else None) for name in (*names, *twins))


def test_an_index_lists_its_shards_once(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}))
    assert shard_names(index) == ["1.safetensors", "2.safetensors"]


NOT_SHARDS = [
    "../a.safetensors",
    "/a.bin",
    "sub/a.bin",
    "a.txt",
    "..",
    "",
    "a\\b.bin",
    "c:a.bin",
    "a\n.bin",
    None,
    3,
    [],
    {},
]


@pytest.mark.parametrize("name", NOT_SHARDS, ids=repr)
def test_an_index_that_names_anything_but_shards_beside_it_is_refused(tmp_path: Path, name: object) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name, "b": "model.safetensors"}}))
    with pytest.raises(CorruptFileError, match=r"index\.json: expected a weight_map to names of"):
        shard_names(index)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', "[" * 9999, "\udcff"])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CorruptFileError, match=r"index\.json: expected a weight_map"):
        shard_names(index)


def test_a_fifo_is_no_index(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    with pytest.raises(CorruptFileError, match="expected a regular file, found a FIFO"):
        shard_names(tmp_path / "model.safetensors.index.json")
