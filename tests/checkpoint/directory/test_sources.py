from pathlib import Path

import pytest
import torch

from hf_trainweights.checkpoint.directory import plain_weights
from hf_trainweights.checkpoint.directory.rewriter import compress_directory
from hf_trainweights.checkpoint.directory.sources import OptimizerFile
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.errors import ConfigError


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
