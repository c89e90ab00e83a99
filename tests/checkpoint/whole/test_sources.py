import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_trainweights.checkpoint.encoded.reader import load_file
from hf_trainweights.checkpoint.manifest.manifest import MANIFEST_NAME
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.rewriting import compress_directory, restore_directory
from hf_trainweights.checkpoint.whole import plain_weights
from hf_trainweights.checkpoint.whole.sources import OptimizerFile
from hf_trainweights.errors import ConfigError, CorruptFileError


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
    load_file = plain_weights.load_file
    monkeypatch.setattr(
        plain_weights, "load_file", lambda file, **options: loaded.append(Path(file).name) or load_file(file, **options)
    )
    compress_directory(path)
    assert sorted(loaded) == ["optimizer.pt", "pytorch_model.bin"]


def test_a_rule_that_needs_names_fails_when_the_optimizer_is_read(tmp_path):
    path = plain_checkpoint(tmp_path / "checkpoint-1")
    policy = Policy(rules={"exp_avg/re:weight": "raw"})
    with pytest.raises(ConfigError, match="names of the optimizer's parameters"):
        OptimizerFile.read(path, policy, {})
    named = OptimizerFile.read(path, policy, {0: "weight", 1: "bias"})
    assert named.plan["state", 0, "exp_avg"].name == "weight"


def test_an_optimizer_file_that_is_no_dict_has_no_state(tmp_path):
    torch.save([torch.ones(3)], tmp_path / "optimizer.pt")
    optimizer = OptimizerFile.read(tmp_path, Policy(), {})
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
