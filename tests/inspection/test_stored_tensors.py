"""Which files of a checkpoint are read, and what is known of each tensor in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_trainweights.checkpoint.directory import compress_directory
from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.inspection.stored_tensors import find_parts, read_tensors


def test_the_weights_are_those_that_a_loader_would_open(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    for name in ("pytorch_model.bin", "optimizer.pt"):
        torch.save({"w": torch.zeros(2)}, tmp_path / name)
    weights, optimizer = tmp_path / "model.safetensors", tmp_path / "optimizer.pt"
    assert find_parts(tmp_path) == {"weights": [weights], "optimizer": [optimizer]}
    assert find_parts(optimizer) == {"optimizer": [optimizer]}
    weights.unlink()
    assert find_parts(tmp_path)["weights"] == [tmp_path / "pytorch_model.bin"]


def test_a_directory_with_neither_part_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a checkpoint with weights or an optimizer\.pt"):
        find_parts(tmp_path)


@pytest.mark.parametrize("values", [True, False])
def test_an_encoded_file_is_decoded_only_if_values_are_asked_for(values: bool, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(64, 64)}, tmp_path / "pytorch_model.bin")
    (plain,) = read_tensors(tmp_path / "pytorch_model.bin", "weights", values=values)
    assert (plain.name, plain.stored_bytes, plain.tensor.is_meta) == ("w", 4 * 64 * 64, False)
    compress_directory(tmp_path)
    (encoded,) = read_tensors(tmp_path / "pytorch_model.bin", "weights", values=values)
    assert (encoded.name, encoded.tensor.shape, encoded.tensor.is_meta) == ("w", (64, 64), not values)
    assert encoded.stored_bytes is not None
    assert 0 < encoded.stored_bytes < plain.stored_bytes


def test_tensors_of_the_optimizer_are_named_by_their_key_path(tmp_path: Path) -> None:
    torch.save({"state": {0: {"exp_avg": torch.ones(2)}}}, tmp_path / "optimizer.pt")
    (stored,) = read_tensors(tmp_path / "optimizer.pt", "optimizer")
    assert stored.name == "optimizer: state.0.exp_avg"


def test_a_file_whose_values_lie_within_themselves_is_refused_by_name(tmp_path):
    tree: dict = {"weight": torch.ones(2)}
    tree["again"] = tree
    torch.save(tree, tmp_path / "weights.pt")
    with pytest.raises(CorruptFileError, match=r"weights\.pt: expected tensors in dicts and lists, found values"):
        list(read_tensors(tmp_path / "weights.pt", "weights"))
