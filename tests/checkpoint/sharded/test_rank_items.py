"""What one rank holds in memory while it writes its items, and their size in the file."""

from __future__ import annotations

import weakref
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint.sharded.states import BETAS, save
from covering import exhaustive
from ranks import run_ranks
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from trees import ADAM_SETTINGS

from hf_trainweights.checkpoint.loop.training_state import save_training_state
from hf_trainweights.checkpoint.planning.policy import LOSSY_MODES, Policy
from hf_trainweights.checkpoint.sharded.index import (
    ShardedAnchor,
    commit,
    file_names,
    find_sharded_anchor,
    free_number,
    name_of,
)
from hf_trainweights.checkpoint.sharded.rank_files import write_others, write_weights
from hf_trainweights.checkpoint.sharded.rank_items import RankItems, RankOrders
from hf_trainweights.checkpoint.sharded.writer import TrainWeightsWriter, plan_tensors
from hf_trainweights.errors import UnstorableError

pytestmark = pytest.mark.slow

SHAPE = (64, 80)
TENSORS = 30


class Source:
    """Makes each tensor when it is asked for, `moved` by so much, and counts how many live."""

    def __init__(self, moved: float = 0.0):
        self.moved = moved
        self.living = self.most = 0
        self.reads: Counter[str] = Counter()

    def resolve(self, item: WriteItem) -> Tensor:
        tensor = torch.randn(SHAPE, generator=torch.Generator().manual_seed(zlib.crc32(item.index.fqn.encode())))
        tensor = tensor.abs() + self.moved
        self.living += 1
        self.reads[item.index.fqn] += 1
        self.most = max(self.most, self.living)
        weakref.finalize(tensor.untyped_storage(), self._gone)
        return tensor

    def _gone(self) -> None:
        self.living -= 1


def item(name: str) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size(SHAPE))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size(SHAPE))
    return WriteItem(MetadataIndex(name, (0, 0)), WriteItemType.SHARD, tensor_data=data)


def write(path: Path, source: Source, anchor: ShardedAnchor | None) -> None:
    names = [f"model.{number}.weight" for number in range(TENSORS)]
    keys = ("exp_avg", "exp_avg_sq")
    names += [f"optim.state.{number}.weight.{key}" for number in range(TENSORS) for key in keys]
    items = [item(name) for name in names]
    paths = {name: name.split(".", 1) for name in names}
    orders = plan_tensors(
        [SavePlan(items, planner_data=paths)], Policy("near-lossless"), None, (), is_delta=anchor is not None
    )
    path.mkdir()
    anchors = anchor.files(anchor.shards) if anchor else {}
    step_rms = anchor.record.step_rms(anchor.interval_steps) if anchor else {}
    rank_orders = RankOrders(*file_names(0, free_number(path)), orders, anchors, step_rms)
    rank = RankItems(path, items, source.resolve, rank_orders, items)
    results = [*write_weights(rank), *write_others(rank)]
    commit(path, Metadata({}), [results], "test", anchor, mode="near-lossless")


def test_weights_are_read_once_and_few_tensors_live_at_a_time_however_many_a_rank_writes(tmp_path: Path) -> None:
    for number in range(2):
        source = Source()
        anchor = find_sharded_anchor(tmp_path / "0", None) if number else None
        write(tmp_path / str(number), source, anchor)
        assert 1 <= source.most <= 6
        assert {source.reads[f"model.{weight}.weight"] for weight in range(TENSORS)} == {1}


def test_a_rank_is_told_of_its_own_shards_alone(tmp_path: Path) -> None:
    for number in range(2):
        write(
            tmp_path / str(number), Source(moved=number), find_sharded_anchor(tmp_path / "0", None) if number else None
        )
    items = [item(f"model.{number}.weight") for number in range(3)]
    paths = {each.index.fqn: tuple(each.index.fqn.split(".", 1)) for each in items}
    plans = [SavePlan([each], planner_data=paths) for each in items]
    for anchor_every in (1, 8):
        writer = TrainWeightsWriter(tmp_path / "2", "near-lossless", anchor=tmp_path / "1", anchor_every=anchor_every)
        for each, plan in zip(items, writer.prepare_global_plan(plans), strict=True):
            orders = plan.storage_data
            assert list(orders.anchors) == ([] if anchor_every == 1 else [name_of(each)])
            assert list(orders.step_rms) == [name_of(each)]


@pytest.mark.parametrize(
    ("tensor", "found"),
    [
        (torch.eye(3).to_sparse(), "layout torch.sparse_coo on cpu"),
        (torch.empty(3, device="meta"), "layout torch.strided on meta"),
        (torch.ones(3, dtype=torch.complex64).conj(), "a lazily conjugated or negated tensor"),
        (torch.empty(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "dtype torch.float4_e2m1fn_x2"),
    ],
    ids=["sparse", "meta", "conjugated", "float4"],
)
def test_a_tensor_that_cannot_be_stored_is_named(tmp_path: Path, tensor: Tensor, found: str) -> None:
    rank = RankItems(tmp_path, [], lambda _: tensor, RankOrders("", ""))
    with pytest.raises(UnstorableError, match=rf"^model\.w: expected a plain dense tensor, found {found}"):
        rank.tensor(item("model.w"))


def test_a_first_moment_is_exact_where_the_second_lies_elsewhere(tmp_path: Path) -> None:
    items = [item(f"optim.state.w.{key}") for key in ("exp_avg", "exp_avg_sq")]
    plans = plan_tensors([SavePlan(items)], Policy("near-lossless"), None, (), is_delta=False)
    assert plans["optim.state.w.exp_avg"].exp_avg_sq is not None
    rank = RankItems(tmp_path, items[:1], Source().resolve, RankOrders(*file_names(0, 0), plans), items)
    assert [stored.row["bound"] for stored in write_others(rank)] == [None]


def large_state(save_number: int) -> dict[str, Any]:
    """Return three matrices of 0.8 million elements each, and their moments."""
    model, states = {}, {}
    for number in range(3):
        start = torch.Generator().manual_seed(number)
        noise = torch.Generator().manual_seed(100 * save_number + number)
        columns = torch.rand(1024, generator=start) + 0.1
        weight = torch.randn(768, 1024, generator=start) * 0.02 + 1e-3 * torch.randn(768, 1024, generator=noise)
        second = (torch.randn(768, 1024, generator=noise) * columns * 1e-4).square() * 0.1 + columns.square() * 1e-8
        first = second.sqrt() * torch.randn(768, 1024, generator=noise) * 0.3
        model[f"{number}.weight"] = weight
        states[f"{number}.weight"] = {"step": torch.tensor(100.0), "exp_avg": first, "exp_avg_sq": second}
    groups = [{"lr": 1e-3, "betas": list(BETAS), **ADAM_SETTINGS, "params": list(model)}]
    return {"model": model, "optim": {"state": states, "param_groups": groups}}


def save_as_one_process(path: Path, state: dict[str, Any], mode: str) -> None:
    names = dict(enumerate(state["model"]))
    states = {index: state["optim"]["state"][name] for index, name in names.items()}
    groups = [{"lr": 1e-3, "betas": BETAS, **ADAM_SETTINGS, "params": list(names)}]
    checkpoint = {
        "model": state["model"],
        "optimizer": {"state": states, "param_groups": groups},
        "step": 100,
        "names": {"buffers": [], "optimizer": names},
    }
    save_training_state(checkpoint, path, Policy(mode), anchor_every=8)


def saves_large(rank: int, directory: Path, mode: str) -> None:
    for number in range(2):
        anchor = directory / "0" if number else None
        save(directory / str(number), cut(large_state(number)), mode, anchor=anchor)


def cut(state: dict[str, Any]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    share = lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]) if tensor.dim() else tensor  # noqa: E731
    states = {n: {key: share(each) for key, each in v.items()} for n, v in state["optim"]["state"].items()}
    return {
        "model": {name: share(each) for name, each in state["model"].items()},
        "optim": {**state["optim"], "state": states},
    }


def size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.suffix != ".anchor")


@pytest.mark.parametrize(
    "mode", ["near-lossless", *exhaustive(*(mode for mode in LOSSY_MODES if mode != "near-lossless"))]
)
def test_two_ranks_write_at_most_a_twentieth_more_than_one_process(tmp_path: Path, mode: str) -> None:
    run_ranks(2, saves_large, tmp_path, mode)
    for number in range(2):
        alone = tmp_path / f"checkpoint-{number + 1}"
        save_as_one_process(alone, large_state(number), mode)
        assert size_bytes(tmp_path / str(number)) <= 1.05 * size_bytes(alone)
