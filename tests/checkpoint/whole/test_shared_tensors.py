"""A tensor that a model has under several names keeps them all, for readers that want each name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from architectures import ARCHITECTURES
from safetensors import safe_open
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from hf_trainweights.checkpoint.directory import compress_directory, restore_directory
from hf_trainweights.checkpoint.encoded.reader import load_file


def make_shared() -> nn.Module:
    torch.manual_seed(0)
    model = nn.ModuleDict({"head": nn.Linear(96, 64), "embedding": nn.Linear(96, 64), "other": nn.Linear(96, 64)})
    model["head"].weight = model["embedding"].weight
    return model


def zeroed(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore:.*the weights stay as they are.*:UserWarning")
@pytest.mark.parametrize("mode", ["lossless", "near-lossless"])
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
@pytest.mark.parametrize("name", ["llama_tied", "llama"])
def test_accelerate_loads_its_state_small_and_plain_again(tmp_path: Path, name: str, safe: bool, mode: str) -> None:
    accelerator = Accelerator(cpu=True)
    model = ARCHITECTURES[name].build()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    ids = torch.arange(12).view(2, 6)
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    accelerator.save_state(str(tmp_path), safe_serialization=safe)
    files = {file.name for file in tmp_path.iterdir()}
    expected = values(model)
    for rewrite in (lambda path: compress_directory(path, mode=mode), restore_directory):
        rewrite(tmp_path)
        zeroed(model)
        accelerator.load_state(str(tmp_path))
        assert same(values(model), expected)
    assert {file.name for file in tmp_path.iterdir()} == {*files, "trainweights.json"}


@pytest.mark.parametrize("weights_only", [True, False])
def test_names_that_safetensors_only_notes_are_in_a_small_file(tmp_path: Path, weights_only: bool) -> None:
    model = make_shared()
    path = tmp_path / "model.safetensors"
    save_model(model, str(path))
    with safe_open(path, "pt") as file:
        assert len(file.keys()) < len(model.state_dict())
    compress_directory(tmp_path, weights_only=weights_only)
    expected = values(model)
    small = load_file(tmp_path / "pytorch_model.bin")
    assert same(small, expected)
    assert small["head.weight"].data_ptr() == small["embedding.weight"].data_ptr()
    zeroed(model).load_state_dict(small)
    assert same(values(model), expected)
    restore_directory(tmp_path)
    if weights_only:
        load_model(zeroed(model), path)
    else:
        zeroed(model).load_state_dict(torch.load(tmp_path / "pytorch_model.bin"))
    assert same(values(model), expected)
