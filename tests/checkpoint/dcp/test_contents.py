"""What a DCP directory holds, by the names of its tensors."""

from __future__ import annotations

from pathlib import Path

from checkpoint.sharded_states import sample_state, save_plain

from hf_trainweights.checkpoint.dcp.contents import ShardedContents


def test_tensors_are_listed_once_however_many_are_asked_for(tmp_path: Path) -> None:
    save_plain(sample_state(), tmp_path)
    contents = ShardedContents(tmp_path)
    assert contents.tensors is contents.tensors
