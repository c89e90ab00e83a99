"""What a DCP directory holds, by the names of its tensors."""

from __future__ import annotations

from pathlib import Path

from checkpoint.sharded_states import sample_state, save_plain

from hf_trainweights.checkpoint.dcp.reader import ShardedContents, dcp_directories


def test_tensors_are_listed_once_however_many_are_asked_for(tmp_path: Path) -> None:
    save_plain(sample_state(), tmp_path)
    contents = ShardedContents(tmp_path)
    assert contents.tensors is contents.tensors


def test_the_checkpoints_of_a_run_are_not_the_parts_of_one(tmp_path: Path) -> None:
    save_plain(sample_state(), tmp_path / "checkpoint-7")
    assert dcp_directories(tmp_path) == []
    assert dcp_directories(tmp_path / "checkpoint-7") == [tmp_path / "checkpoint-7"]
