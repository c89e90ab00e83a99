"""What a DCP directory holds, by the names of its tensors."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from checkpoint.sharded.states import save, without_process_group
from checkpoint.sharded_states import sample_state, save_plain
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from hf_trainweights.checkpoint.dcp.reader import ShardedContents, TrainWeightsReader, dcp_directories
from hf_trainweights.errors import CorruptFileError


def test_tensors_are_listed_once_however_many_are_asked_for(tmp_path: Path) -> None:
    save_plain(sample_state(), tmp_path)
    contents = ShardedContents(tmp_path)
    assert contents.tensors is contents.tensors


def test_the_checkpoints_of_a_run_are_not_the_parts_of_one(tmp_path: Path) -> None:
    save_plain(sample_state(), tmp_path / "checkpoint-7")
    assert dcp_directories(tmp_path) == []
    assert dcp_directories(tmp_path / "checkpoint-7") == [tmp_path / "checkpoint-7"]


def test_of_weights_that_share_their_bytes_an_error_names_the_one_that_does_not_fit(tmp_path: Path) -> None:
    weight, whole = torch.ones(2, 2), torch.Size([2, 2])
    with without_process_group():
        save(tmp_path, {"model": {"first": weight, "second": weight}})
    reader = TrainWeightsReader(tmp_path)
    reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
    indices = [MetadataIndex(f"model.{name}", (0, 0)) for name in ("first", "second")]
    corner = torch.Size([0, 0])
    items = [ReadItem(LoadItemType.TENSOR, index, corner, index, corner, whole) for index in indices]
    planner = Mock()
    planner.resolve_tensor.side_effect = [torch.empty(2, 2), torch.empty(3, 3)]
    with pytest.raises(CorruptFileError, match=r"model\.second: expected the shard"):
        reader.read_data(LoadPlan(items), planner)
