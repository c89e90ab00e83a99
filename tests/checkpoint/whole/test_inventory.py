import pytest
import torch

from hf_trainweights.checkpoint.whole.inventory import take_inventory
from hf_trainweights.errors import ConfigError, UnsupportedError


def saved(path, *names):
    path.mkdir()
    for name in names:
        torch.save({"w": torch.ones(2)}, path / name)
    return path


def test_weights_are_listed_apart_from_other_files(tmp_path):
    path = saved(tmp_path / "a", "pytorch_model.bin", "optimizer.pt", "adapter_model.bin", "scheduler.pt")
    (path / "config.json").write_text("{}")
    inventory = take_inventory(path)
    assert inventory.weight_files == (path / "pytorch_model.bin",)
    assert [file.name for file in inventory.other_files] == ["adapter_model.bin", "optimizer.pt", "scheduler.pt"]


def test_new_weights_replace_the_other_weight_files_and_their_digests(tmp_path):
    path = saved(tmp_path / "a", "model.safetensors", "pytorch_model.bin")
    (path / "trainweights_files.json").write_text("{}")
    replaced = take_inventory(path).replaced_by("pytorch_model.bin")
    assert [file.name for file in replaced] == ["model.safetensors", "trainweights_files.json"]


@pytest.mark.parametrize("exists", [False, True])
def test_what_holds_no_training_state_is_no_checkpoint(tmp_path, exists):
    path = saved(tmp_path / "a") if exists else tmp_path / "a"
    with pytest.raises(ConfigError, match="expected a directory with weights or other torch files"):
        take_inventory(path)


def test_a_sharded_checkpoint_is_refused(tmp_path):
    path = saved(tmp_path / "a", "optimizer.pt")
    (path / "zero_to_fp32.py").write_text("")
    with pytest.raises(UnsupportedError, match=r"expected a checkpoint in whole files, found zero_to_fp32\.py"):
        take_inventory(path)
