"""`trainweights checkpoint` on sharded checkpoints: each command takes them, plain and small."""

from __future__ import annotations

from pathlib import Path

import pytest
from architectures import ARCHITECTURES
from checkpoint.sharded_states import load_stock_trainer, sample_state, save_as_trainer, save_plain
from command_line import run, run_json
from transformers import AutoModelForCausalLM
from trees import fingerprint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "checkpoint-7"
    save_as_trainer(sample_state(), path)
    return path


@pytest.mark.slow
def test_plain_ones_are_listed_and_called_unverified(checkpoint: Path) -> None:
    for path in (checkpoint, checkpoint.parent, checkpoint / "optimizer_0"):
        (row,) = run_json("checkpoint", "ls", path)
        assert row["mode"] is None
        (row,) = run_json("checkpoint", "verify", path)
        assert row["state"] == "unverified"


def test_a_plain_one_is_unverified_under_any_name(checkpoint: Path) -> None:
    (row,) = run_json("checkpoint", "verify", checkpoint.rename(checkpoint.with_name("best")))
    assert row["state"] == "unverified"


def test_a_missing_shard_is_damage(checkpoint: Path) -> None:
    (checkpoint / "optimizer_0" / "__1_0.distcp").unlink()
    (row,) = run_json("checkpoint", "verify", checkpoint, exit_code=1)
    assert "__1_0.distcp: expected" in row["problems"][""]


def test_tensors_are_listed_whole(checkpoint: Path) -> None:
    tensors = {tensor["name"]: tensor for tensor in run_json("inspect", checkpoint)["tensors"]}
    assert tensors["embed.weight"]["shape"] == [128, 64]
    assert "optimizer: state.embed.weight.exp_avg" in tensors


@pytest.mark.slow
def test_two_checkpoints_are_compared_whatever_their_ranks(checkpoint: Path, tmp_path: Path) -> None:
    save_as_trainer(sample_state(), tmp_path / "other", ranks=3)
    compared = run_json("checkpoint", "diff", checkpoint, tmp_path / "other")
    assert compared["equal"] == len(compared["tensors"]) > 10


@pytest.mark.slow
def test_restore_writes_a_model_that_transformers_reads(tmp_path: Path) -> None:
    model = ARCHITECTURES["llama"].build()
    save_plain({"model": model.state_dict()}, tmp_path / "dcp")
    model.config.save_pretrained(tmp_path / "elsewhere")
    config = tmp_path / "elsewhere" / "config.json"
    shown = run_json("checkpoint", "restore", tmp_path / "dcp", tmp_path / "out", "--to", "model", "--config", config)
    assert shown["layout"] == "model"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert fingerprint(dict(loaded.state_dict())) == fingerprint(dict(model.state_dict()))


@pytest.mark.slow
def test_restore_writes_plain_files_elsewhere(checkpoint: Path, tmp_path: Path) -> None:
    result = run("checkpoint", "restore", checkpoint, tmp_path / "out", "--to", "dcp")
    assert result.exit_code == 0, result.output
    state = sample_state()
    assert fingerprint(load_stock_trainer(state, tmp_path / "out")) == fingerprint(state)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["out"], ["--to", "model"], ["out", "--to", "dcp", "--config", "config.json"]])
def test_options_of_restore_that_do_not_fit_together_are_wrong_usage(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert run("checkpoint", "restore", checkpoint, *arguments).exit_code == 2
