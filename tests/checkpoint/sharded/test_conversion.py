"""Sharded checkpoints of any number of ranks become a model's directory, or plain DCP files, tensor by tensor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES
from checkpoint.sharded_states import (
    load_stock,
    load_stock_trainer,
    sample_state,
    save_alone,
    save_as_trainer,
    save_plain,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from trees import fingerprint

from hf_trainweights.checkpoint import compress_directory
from hf_trainweights.checkpoint.dcp.reader import ShardedContents
from hf_trainweights.checkpoint.sharded.conversion import restore_as_dcp, restore_as_model
from hf_trainweights.errors import ConfigError, CorruptFileError


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_a_model_comes_back_from_any_number_of_ranks(tmp_path: Path, name: str, ranks: int) -> None:
    model = ARCHITECTURES[name].build()
    save_plain({"model": model.state_dict()}, tmp_path / "dcp", ranks)
    model.config.save_pretrained(tmp_path)
    restore_as_model(tmp_path / "dcp", tmp_path / "out")
    loaded = type(model).from_pretrained(tmp_path / "out")
    assert fingerprint(dict(loaded.state_dict())) == fingerprint(dict(model.state_dict()))


@pytest.mark.slow
def test_a_flat_state_dict_and_a_config_elsewhere_serve_as_well(tmp_path: Path) -> None:
    model = ARCHITECTURES["llama"].build()
    save_plain(model.state_dict(), tmp_path / "dcp")
    model.config.save_pretrained(tmp_path / "config")
    restore_as_model(tmp_path / "dcp", tmp_path / "out", config=tmp_path / "config" / "config.json")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert fingerprint(dict(loaded.state_dict())) == fingerprint(dict(model.state_dict()))


def test_adapters_become_adapters(tmp_path: Path) -> None:
    state = {"base_model.model.layer.lora_A.weight": torch.randn(2, 8, generator=torch.Generator().manual_seed(0))}
    save_plain({"model": state}, tmp_path / "checkpoint-1" / "pytorch_model_fsdp_0")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    restore_as_model(tmp_path / "checkpoint-1", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert fingerprint(load_file(tmp_path / "out" / "adapter_model.safetensors")) == fingerprint(state)


@pytest.mark.slow
def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_plain({"model": {f"w{number}": torch.full((512, 512), 1.0) for number in range(8)}}, tmp_path / "dcp")
    (tmp_path / "config.json").write_text("{}")
    alive: list[int] = []
    original = ShardedContents.read_tensor

    def counted(self: ShardedContents, name: str) -> torch.Tensor:
        import gc

        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape == (512, 512)]
        alive.append(len([tensor for tensor in tensors if not tensor.is_meta]))
        return original(self, name)

    monkeypatch.setattr(ShardedContents, "read_tensor", counted)
    restore_as_model(tmp_path / "dcp", tmp_path / "out")
    assert len(alive) == 8
    assert max(alive) - alive[0] <= 1


@pytest.mark.slow
def test_a_checkpoint_of_a_trainer_becomes_one_of_plain_files(tmp_path: Path) -> None:
    state = sample_state()
    save_as_trainer(state, tmp_path / "checkpoint-7")
    restore_as_dcp(tmp_path / "checkpoint-7", tmp_path / "out")
    assert fingerprint(load_stock_trainer(state, tmp_path / "out")) == fingerprint(state)
    assert (tmp_path / "out" / "trainer_state.json").is_file()


def test_a_rewriting_that_died_between_its_two_indices_leaves_what_was_there_before(tmp_path: Path) -> None:
    state, directory = {"model": {"w": torch.ones(64, 80)}}, tmp_path / "dcp"
    save_plain(state, directory)
    compress_directory(directory)
    before = {file: file.read_bytes() for file in directory.iterdir() if file.name != "trainweights.json"}
    compress_directory(directory, rules={"weight": "raw"})
    for file, content in before.items():
        file.write_bytes(content)
    restore_as_dcp(directory, tmp_path / "out")
    assert fingerprint(load_stock(state, tmp_path / "out")) == fingerprint(state)


def test_without_metadata_there_is_no_checkpoint(tmp_path: Path) -> None:
    save_plain(sample_state(), tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").unlink()
    with pytest.raises(CorruptFileError, match=r"dcp: expected a \.metadata, which is written last, found none"):
        restore_as_dcp(tmp_path / "dcp", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["missing", "short", "flipped"])
def test_a_damaged_shard_leaves_nothing_behind(tmp_path: Path, damage: str) -> None:
    save_plain(sample_state(), tmp_path / "dcp")
    (tmp_path / "config.json").write_text("{}")
    shard = tmp_path / "dcp" / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    if damage == "missing":
        shard.unlink()
    elif damage == "short":
        shard.write_bytes(content[:-1000])
    else:
        content[500:600] = bytes(100)
        shard.write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"__1_0\.distcp"):
        restore_as_model(tmp_path / "dcp", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_no_sharded_checkpoint_and_what_lacks_a_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"expected a directory with \.metadata, found none"):
        restore_as_model(tmp_path / "empty", tmp_path / "out")
    save_alone({"x": 1}, tmp_path / "dcp")
    with pytest.raises(ConfigError, match="expected a sharded checkpoint with a model's weights, found none"):
        restore_as_model(tmp_path / "dcp", tmp_path / "out")
    shutil.rmtree(tmp_path / "dcp")
    save_plain(sample_state(), tmp_path / "a" / "b" / "c" / "dcp")
    with pytest.raises(ConfigError, match=r"expected a config\.json beside the checkpoint or above it, found none"):
        restore_as_model(tmp_path / "a" / "b" / "c" / "dcp", tmp_path / "out")
