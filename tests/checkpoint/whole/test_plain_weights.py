import json
import warnings

import pytest
import torch
from safetensors.torch import save_file

from hf_trainweights.checkpoint.rewriting import compress_directory
from hf_trainweights.checkpoint.whole.plain_weights import load_if_possible, read_weights, weight_files
from hf_trainweights.errors import CorruptFileError


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
