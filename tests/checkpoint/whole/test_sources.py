import json
import os
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_trainweights.checkpoint.directory import compress_directory, restore_directory
from hf_trainweights.checkpoint.encoded.reader import load_file
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.run import weight_files as files_of_weights
from hf_trainweights.checkpoint.run.weight_files import read_weights, weight_files
from hf_trainweights.checkpoint.whole import rewriting
from hf_trainweights.checkpoint.whole.rewriting import (
    Inventory,
    OptimizerFile,
    load_if_possible,
)
from hf_trainweights.errors import ConfigError, CorruptFileError, UnsupportedError


def plain_checkpoint(path):
    model = torch.nn.Linear(80, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 80)).sum().backward()
    optimizer.step()
    path.mkdir()
    torch.save(model.state_dict(), path / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    return path


def test_each_file_is_loaded_once(tmp_path, monkeypatch):
    path, loaded = plain_checkpoint(tmp_path / "checkpoint-1"), []
    load_file = rewriting.load_file
    for module in (rewriting, files_of_weights):
        monkeypatch.setattr(
            module, "load_file", lambda file, **options: loaded.append(Path(file).name) or load_file(file, **options)
        )
    compress_directory(path)
    assert sorted(loaded) == ["optimizer.pt", "pytorch_model.bin"]


def test_a_rule_that_needs_names_fails_when_the_optimizer_is_read(tmp_path):
    path = plain_checkpoint(tmp_path / "checkpoint-1")
    policy = Policy(rules={"exp_avg/re:weight": "raw"})
    with pytest.raises(ConfigError, match="names of the optimizer's parameters"):
        OptimizerFile(path, policy, {})
    named = OptimizerFile(path, policy, {0: "weight", 1: "bias"})
    assert named.plan["state", 0, "exp_avg"].name == "weight"


def test_an_optimizer_file_that_is_no_dict_has_no_state(tmp_path):
    torch.save([torch.ones(3)], tmp_path / "optimizer.pt")
    optimizer = OptimizerFile(tmp_path, Policy(), {})
    assert (optimizer.state, optimizer.plan) == ({}, {})
    assert torch.equal(optimizer.tree[0], torch.ones(3))


def state(value):
    return {"w": torch.full((64, 64), float(value))}


def moments(value):
    state = {"step": torch.tensor(1.0), "exp_avg": torch.full((64, 64), float(value))}
    return {"state": {0: state}, "param_groups": [{"params": [0], "param_names": ["w"]}]}


def written(path, content, time):
    """Write a file as of a time in seconds."""
    if path.suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save(content, path)
    os.utime(path, (time, time))


def weights_of(path):
    return load_file(path)["w"][0, 0].item()


def moments_of(path):
    return load_file(path)["state"][0]["exp_avg"][0, 0].item()


@pytest.mark.parametrize("earlier_is_small", [False, True])
def test_of_two_files_of_weights_the_newer_counts(tmp_path, earlier_is_small):
    path = tmp_path / "checkpoint-1"
    path.mkdir()
    written(path / "model.safetensors", state(1), 10)
    written(path / "pytorch_model_fsdp.bin", state(1), 11)
    if earlier_is_small:
        compress_directory(path)
        (path / MANIFEST_NAME).unlink()
    written(path / "model.safetensors", state(2), 2_000_000_000)
    compress_directory(path)
    assert {file.name: weights_of(file) for file in path.glob("*.bin")} == {
        "pytorch_model.bin": 2.0,
        "pytorch_model_fsdp.bin": 2.0,
    }


@pytest.mark.slow
@pytest.mark.parametrize("names", [("optimizer.pt", "optimizer.bin"), ("optimizer.bin", "optimizer.pt")])
@pytest.mark.parametrize("earlier_is_small", [False, True])
def test_of_two_files_of_moments_the_newer_is_made_small_and_the_other_stays(tmp_path, names, earlier_is_small):
    path, (old, new) = tmp_path / "checkpoint-1", names
    path.mkdir()
    written(path / "model.safetensors", state(1), 10)
    written(path / old, moments(1), 10)
    if earlier_is_small:
        compress_directory(path)
        (path / MANIFEST_NAME).unlink()
    written(path / new, moments(2), 2_000_000_000)
    before = (path / old).read_bytes()
    with pytest.warns(UserWarning, match=f"{old} stays as it is: it is no newer than {new}"):
        compress_directory(path)
    assert (path / old).read_bytes() == before
    assert (moments_of(path / old), moments_of(path / new)) == (1.0, 2.0)
    restore_directory(path)
    with pytest.warns(UserWarning, match=f"{old} stays as it is: it is no newer than {new}"):
        compress_directory(path)
    assert (moments_of(path / old), moments_of(path / new)) == (1.0, 2.0)


@pytest.mark.parametrize(
    "names", [("model.safetensors", "pytorch_model_fsdp.bin"), ("model.safetensors", "pytorch_model.bin")]
)
def test_two_files_of_weights_of_the_same_time_must_agree(tmp_path, names):
    path = tmp_path / "checkpoint-1"
    path.mkdir()
    for name, value in zip(names, (1, 2), strict=True):
        written(path / name, state(value), 10)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(CorruptFileError, match=r"another one in .*, of the same time\. One of them is of an earlier"):
        compress_directory(path)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    written(path / names[1], {**state(1), "tied": torch.ones(1)}, 10)
    compress_directory(path)
    assert weights_of(path / "pytorch_model.bin") == 1.0


def test_two_files_of_moments_of_the_same_time_must_agree(tmp_path):
    for name, value in (("optimizer.pt", 1), ("optimizer.bin", 2)):
        written(tmp_path / name, moments(value), 10)
    with pytest.raises(CorruptFileError, match="of the same time"):
        compress_directory(tmp_path)
    written(tmp_path / "optimizer.bin", moments(1), 10)
    with pytest.warns(UserWarning, match=r"optimizer\.bin stays as it is"):
        compress_directory(tmp_path)


def test_the_file_that_loaders_open_first_is_at_the_head_and_an_index_before_its_shards(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model-1.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "model-1.safetensors"}}))
    for name in ("pytorch_model.bin", "adapter_model.bin"):
        torch.save({"w": torch.zeros(2)}, tmp_path / name)
    names = [file.name for file in weight_files(tmp_path)]
    assert names == ["model.safetensors.index.json", "pytorch_model.bin", "model-1.safetensors"]
    assert torch.equal(read_weights(tmp_path / names[0])["w"], torch.ones(2))


def test_what_holds_more_than_data_is_not_loaded(tmp_path):
    torch.save({"object": slice(1, 2)}, tmp_path / "optimizer.pt")
    assert load_if_possible(tmp_path / "optimizer.pt") is None
    with pytest.raises(CorruptFileError, match=r"optimizer\.pt"):
        read_weights(tmp_path / "optimizer.pt")


def test_what_was_saved_on_a_gpu_becomes_small_where_there_is_none(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save({"w": torch.arange(6000.0)}, tmp_path / "pytorch_model.bin")
        torch.save({"state": {0: {"exp_avg": torch.ones(9)}}, "param_groups": []}, tmp_path / "optimizer.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compress_directory(tmp_path)
    loaded = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert torch.equal(loaded["w"], torch.arange(6000.0))


def saved(path, *names):
    path.mkdir()
    for name in names:
        torch.save({"w": torch.ones(2)}, path / name)
    return path


def test_weights_are_listed_apart_from_other_files(tmp_path):
    path = saved(tmp_path / "a", "pytorch_model.bin", "optimizer.pt", "adapter_model.bin", "scheduler.pt")
    (path / "config.json").write_text("{}")
    inventory = Inventory(path)
    assert inventory.weight_files == [path / "pytorch_model.bin"]
    assert [file.name for file in inventory.other_files] == ["adapter_model.bin", "optimizer.pt", "scheduler.pt"]


def test_new_weights_replace_the_other_weight_files_and_their_digests(tmp_path):
    path = saved(tmp_path / "a", "model.safetensors", "pytorch_model.bin")
    (path / "trainweights_files.json").write_text("{}")
    replaced = Inventory(path).replaced_by("pytorch_model.bin")
    assert [file.name for file in replaced] == ["model.safetensors", "trainweights_files.json"]


@pytest.mark.parametrize("exists", [False, True])
def test_what_holds_no_training_state_is_no_checkpoint(tmp_path, exists):
    path = saved(tmp_path / "a") if exists else tmp_path / "a"
    with pytest.raises(ConfigError, match="expected a directory with weights or other torch files"):
        Inventory(path)


def test_a_sharded_checkpoint_is_refused(tmp_path):
    path = saved(tmp_path / "a", "optimizer.pt")
    (path / "zero_to_fp32.py").write_text("")
    with pytest.raises(UnsupportedError, match=r"expected a checkpoint in whole files, found zero_to_fp32\.py"):
        Inventory(path)
