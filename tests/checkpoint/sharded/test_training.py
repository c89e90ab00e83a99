"""Training under FSDP2 that is saved and resumed: in the background, by Stateful objects, on other numbers of ranks."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint.sharded.states import differing, failures, load, save, sharded, whole_state
from covering import exhaustive
from helpers import flip_a_bit
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hf_trainweights.checkpoint import verify_checkpoint
from hf_trainweights.checkpoint.manifest import read_manifest
from hf_trainweights.distributed import TrainWeightsReader, TrainWeightsWriter

pytestmark = pytest.mark.slow


class AppState:
    """What PyTorch's recipe for DCP saves: an object that has `state_dict` and `load_state_dict`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def build(seed: int, mesh_shape: tuple[int, ...] | None = None) -> AppState:
    """Return a model whose rows no number of ranks divides, and its optimizer, under FSDP2 on all ranks."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(80, 67), nn.Tanh(), nn.Linear(67, 80), nn.LayerNorm(80), nn.Linear(80, 3))
    shape = mesh_shape or (dist.get_world_size(),)
    names = ("replicas", "shards") if len(shape) == 2 else ("shards",)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return AppState(model, torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95)))


def train(state: AppState, first: int, last: int) -> list[float]:
    """Train on batches that are the same on every rank, so that any number of ranks computes nearly the same."""
    losses = []
    for step in range(first, last):
        batch = torch.randn(8, 80, generator=torch.Generator().manual_seed(step))
        loss = state.model(batch).square().mean()
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        losses.append(loss.item())
    return losses


def whole(state: AppState) -> dict[str, Any]:
    """Return weights and moments as whole tensors by name."""
    found = {}
    for name, parameter in state.model.named_parameters():
        values = {"weight": parameter.detach(), **state.optimizer.state[parameter]}
        for key, each in values.items():
            found[f"{name}.{key}"] = each.full_tensor() if isinstance(each, DTensor) else each.clone()
    return found


def saves_in_the_background(rank: int, directory: Path) -> list[float]:
    state = build(0)
    train(state, 0, 4)
    group: Any = dist.new_group()  # collectives of two threads in one group would mix
    writer = TrainWeightsWriter(directory / "0")
    saving: Any = state_dict_saver.async_save({"app": state}, storage_writer=writer, process_group=group)
    losses = train(state, 4, 8)  # while the first save encodes
    saving.result()
    writer = TrainWeightsWriter(directory / "1", anchor=directory / "0")
    saving = state_dict_saver.async_save({"app": state}, storage_writer=writer, process_group=group)
    expected = whole(state)
    losses += train(state, 8, 12)
    saving.result()
    if rank == 0:
        torch.save(expected, directory / "expected.pt")
    return losses


def resumes(rank: int, directory: Path, reader: type) -> tuple[list[str], list[float]]:
    state = build(1)
    train(state, 0, 1)  # so that the optimizer has a state to load into
    state_dict_loader.load({"app": state}, storage_reader=reader(directory / "1"))
    expected = torch.load(directory / "expected.pt")
    differences = [name for name, each in whole(state).items() if not torch.equal(each, expected[name])]
    return differences, train(state, 8, 12)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    directory = tmp_path_factory.mktemp("trained")
    return directory, run_ranks(2, saves_in_the_background, directory)[0]


@pytest.mark.parametrize(
    ("world_size", "reader"), [(2, TrainWeightsReader), *exhaustive((2, FileSystemReader), (3, TrainWeightsReader))]
)
def test_a_run_goes_on_from_a_save_in_the_background(
    trained: tuple[Path, list[float]], world_size: int, reader: type
) -> None:
    directory, losses = trained
    for differences, resumed in run_ranks(world_size, resumes, directory, reader):
        assert differences == []
        if world_size == 2:
            assert resumed == losses[4:]
        else:
            assert resumed == pytest.approx(losses[4:], rel=1e-4)


def test_a_save_in_the_background_stores_differences_and_verifies(trained: tuple[Path, list[float]]) -> None:
    directory, _ = trained
    assert verify_checkpoint(directory / "1").ok
    assert len(list((directory / "1").glob("*.anchor"))) == 2


def hybrid(rank: int, directory: Path) -> list[str]:
    state = build(0, (2, 2))
    train(state, 0, 3)
    state_dict_saver.save({"app": state}, storage_writer=TrainWeightsWriter(directory / "0", "near-lossless"))
    expected = whole(state)
    other = build(1, (2, 2))
    train(other, 0, 1)
    state_dict_loader.load({"app": other}, storage_reader=TrainWeightsReader(directory / "0"))
    return [name for name, each in whole(other).items() if not torch.equal(each, expected[name])]


def test_states_that_several_ranks_hold_are_stored_once_and_both_moments_by_one_rank(tmp_path: Path) -> None:
    for rounded in run_ranks(4, hybrid, tmp_path):
        assert {name.rsplit(".", 1)[1] for name in rounded} == {"weight", "exp_avg", "exp_avg_sq"}
    rows = [row for entry in read_manifest(tmp_path / "0").files.values() for row in entry.report.get("tensors", ())]
    items = [(row["path"], row.get("shard")) for row in rows]
    assert len(items) == len(set(items))
    # Of the two large weights the others would fall back to exact, had the ranks been given one moment each.
    codecs = [row["codec"] for row in rows if row["role"] == "exp_avg" and row["bytes_in"] > 8192]
    assert codecs == ["update-space"] * 4


def saves_with(rank: int, path: Path, anchor: Path | None, number: int) -> None:
    with warnings.catch_warnings(action="error"):
        save(path, sharded(whole_state(number)), "near-lossless", anchor=anchor)


def loads(rank: int, path: Path) -> list[str]:
    return differing(load(path), whole_state(1))


def test_a_save_is_full_where_the_sharding_changed(tmp_path: Path) -> None:
    run_ranks(2, saves_with, tmp_path / "0", None, 0)
    run_ranks(3, saves_with, tmp_path / "1", tmp_path / "0", 1)
    assert list((tmp_path / "1").glob("*.anchor")) == []
    rows = [row for entry in read_manifest(tmp_path / "1").files.values() for row in entry.report.get("tensors", ())]
    assert {row["codec"] for row in rows if row.get("bound")} >= {"update-space", "delta-uniform"}
    for rounded in run_ranks(4, loads, tmp_path / "1"):
        assert all(name.startswith("optim.state.") or name.endswith(".weight") for name in rounded)
    run_ranks(3, saves_with, tmp_path / "2", tmp_path / "1", 2)
    assert len(list((tmp_path / "2").glob("*.anchor"))) == 3


def damaged_by(rank: int, path: Path) -> dict[int, str]:
    return {each: type(error).__name__ for each, error in failures(lambda: load(path)).items()}


def test_a_damaged_anchor_of_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    run_ranks(2, saves_with, tmp_path / "0", None, 0)
    run_ranks(2, saves_with, tmp_path / "1", tmp_path / "0", 1)
    shutil.rmtree(tmp_path / "0")
    anchor = sorted((tmp_path / "1").glob("*.anchor"))[0]
    flip_a_bit(anchor, 1000)
    results = run_ranks(2, damaged_by, tmp_path / "1")
    assert results[0] == results[1]
    assert set(results[0].values()) == {"CorruptFileError"}
