"""Objects of other packages among the states of an optimizer, such as the projectors of GaLore and APOLLO."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.zero.zero_files import pretended_packages

from hf_trainweights.checkpoint import compress_directory, restore_directory
from hf_trainweights.checkpoint.encoded import objects
from hf_trainweights.checkpoint.planning.policy import MODES
from hf_trainweights.errors import UnsupportedError

PROJECTORS = [name for _, name in objects.stand_ins() if name.endswith("Projector")]


def checkpoint_of(path: Path, projector: str) -> dict[str, Any]:
    """Write a Trainer's checkpoint whose optimizer keeps a projector, and return its attributes."""
    path.mkdir()
    torch.manual_seed(0)
    attributes = {"rank": 32, "scale": 0.25, "proj_type": "std", "ortho_matrix": torch.randn(32, 256)}
    states = {"step": 3, "exp_avg": torch.randn(256, 32) / 100, "exp_avg_sq": torch.rand(256, 32) / 1000}
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "rank": 32, "params": [0]}
    state = {0: {**states, "projector": objects.build_object(projector, attributes)}}
    with pretended_packages():
        torch.save({"state": state, "param_groups": [group]}, path / "optimizer.pt")
    torch.save({"w": torch.randn(256, 256)}, path / "pytorch_model.bin")
    (path / "trainer_state.json").write_text('{"global_step": 3}')
    return attributes


def assert_holds(tree: Any, attributes: dict[str, Any], projector: str) -> None:
    made = tree["state"][0]["projector"]
    assert objects.object_name(made) == projector
    assert vars(made).keys() == attributes.keys()
    assert torch.equal(made.ortho_matrix, attributes["ortho_matrix"])
    assert (made.rank, made.scale, made.proj_type) == (32, 0.25, "std")


@pytest.mark.parametrize("projector", PROJECTORS)
@pytest.mark.parametrize("mode", MODES)
def test_a_file_with_projectors_becomes_small_and_torch_loads_it_without_trusting_a_pickle(
    tmp_path: Path, projector: str, mode: str
) -> None:
    path = tmp_path / "checkpoint-3"
    attributes = checkpoint_of(path, projector)
    plain = (path / "optimizer.pt").stat().st_size
    with pytest.raises(Exception, match="Weights only load failed"):
        torch.load(path / "optimizer.pt", weights_only=True)
    compress_directory(path, mode=mode)
    assert (path / "optimizer.pt").stat().st_size < plain
    assert_holds(torch.load(path / "optimizer.pt", weights_only=True), attributes, projector)


def test_states_beside_a_projector_stay_exact_in_a_lossy_mode(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-3"
    checkpoint_of(path, PROJECTORS[0])
    report = compress_directory(path, mode="compact").files["optimizer.pt"].report["tensors"]
    assert {row["bound"] for row in report} == {None}


def test_a_restored_file_has_the_objects_of_the_package(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-3"
    attributes = checkpoint_of(path, PROJECTORS[0])
    compress_directory(path)
    with pretended_packages():
        restore_directory(path)
        tree = torch.load(path / "optimizer.pt", weights_only=False)
    assert_holds(tree, attributes, PROJECTORS[0])


def test_nothing_is_restored_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint-3"
    checkpoint_of(path, PROJECTORS[0])
    compress_directory(path)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    package = PROJECTORS[0].partition(".")[0]
    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(objects, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=f"pip install {package}"):
        restore_directory(path)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
