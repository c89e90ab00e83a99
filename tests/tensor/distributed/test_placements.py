"""What each rank holds of a weight, by the placements alone: no process group is needed to tell."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.tensor.distributed.placements import Placed, check_parts, sizes_of


def placed(names: tuple[str, ...], coordinate: list[int] | None, placements: list[Any], rows: int = 10) -> Placed:
    """Return a weight `[rows, 64]` on a mesh of three ranks, or of two by three."""
    mesh = SimpleNamespace(
        mesh_dim_names=names, ndim=len(names), shape=(2, 3)[-len(names) :], get_coordinate=lambda: coordinate
    )
    whole: Any = SimpleNamespace(device_mesh=mesh, placements=placements, shape=torch.Size((rows, 64)), dim=lambda: 2)
    return Placed("w", Int8(), False, whole)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_where_fsdp_gathers_every_rank_sends_as_many_rows_as_the_first_has(rank: int) -> None:
    weight = placed(("fsdp",), [rank], [Shard(0)])
    assert weight.own_intervals() == [[(4 * rank, min(4 * rank + 4, 10))], [(0, 64)]]
    assert weight.gathered_rows() == 4


def test_the_first_rank_is_that_of_the_ranks_that_gather_from_each_other() -> None:
    weight = placed(("tp", "fsdp"), [1, 2], [Shard(0), Shard(0)])
    assert weight.own_intervals() == [[(9, 10)], [(0, 64)]]
    assert weight.gathered_rows() == 2


def test_nobody_gathers_rows_of_a_tensor_parallel_weight_or_on_a_rank_outside_of_the_mesh() -> None:
    assert placed(("tp",), [0], [Shard(0)]).gathered_rows() is None
    assert placed(("fsdp",), None, [Shard(0)]).gathered_rows() is None


def test_more_ranks_than_rows_leave_some_without_any() -> None:
    assert [placed(("fsdp",), [rank], [Shard(0)], rows=2).own_intervals()[0] for rank in range(3)] == [
        [(0, 1)],
        [(1, 2)],
        [],
    ]
    assert placed(("fsdp",), [2], [Replicate()], rows=2).own_intervals()[0] == [(0, 2)]


def test_a_packed_weight_is_cut_within_each_of_its_parts() -> None:
    halves = Shard(0)
    halves.split_factor = 2
    assert placed(("tp",), [1], [halves], rows=12).own_intervals()[0] == [(2, 4), (8, 10)]


@pytest.mark.parametrize("rows", [1, 4, 6, 7, 12])
@pytest.mark.parametrize("places", [(0, 0), (0, 1), (1, 0)])
def test_all_parts_are_checked_though_each_dimension_is_cut_once(
    rows: int, places: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = placed(("tp", "fsdp"), [0, 0], [Shard(dim) for dim in places], rows)
    parts = [sizes_of(weight.intervals(rank)) for rank in itertools.product(range(2), range(3))]
    cut, arange = [], torch.arange
    monkeypatch.setattr(torch, "arange", lambda size, **options: cut.append(size) or arange(size, **options))
    is_refused = any(0 in part for part in parts)
    with pytest.raises(UnsupportedError, match="a part of") if is_refused else contextlib.nullcontext():
        check_parts(weight)
    assert cut == [rows, 64][: len(cut)]
