"""Parts of quantized weights: what a rank holds is what its rows and columns of the whole weight stand for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import by_default
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from weights import FORMS, KINDS, random_weight, same_stored, weight_of

from hf_trainweights import QuantizedTensor
from hf_trainweights.errors import UnsupportedError
from hf_trainweights.formats import get_format
from hf_trainweights.formats.base import Format
from hf_trainweights.tensor.distributed.placements import Placed, check_parts, is_distributed, local_tensor, with_local
from hf_trainweights.tensor.distributed.shards import cut, has_own_codes

FORMATS = FORMS | {"int4_g32_columns": get_format({"format": "int4", "group_size": 32, "column_scale": True})}
# K = 512, so that every format has whole groups in a half and in a quarter of it.
LAYOUTS = {
    "matrix": ((8, 512), False),
    "matrix_transposed": ((512, 8), True),
    "experts": ((4, 8, 512), False),
    "experts_transposed": ((4, 512, 8), True),
}
PLACEMENTS: dict[str, Any] = {
    "first": Shard(0),
    "before_last": Shard(-2),
    "last": Shard(-1),
    "packed_before_last": _StridedShard(-2, split_factor=2),
    "packed_last": _StridedShard(-1, split_factor=2),
    "none": Replicate(),
}


@contextmanager
def rank_of(ranks: int, rank: int) -> Iterator[None]:
    """Be one of several ranks that never hear of each other: to cut takes no communication."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def placed(shape: tuple[int, ...], *placements: Any, mesh_shape: tuple[int, ...] | None = None) -> DTensor:
    """Return a parameter on the meta device that is placed so, as a plan does it."""
    mesh = init_device_mesh("cpu", mesh_shape or (dist.get_world_size(),))
    dims = [_with_dim(placement, len(shape)) for placement in placements]
    return distribute_tensor(torch.empty(shape, device="meta"), mesh, dims, src_data_rank=None)


def _with_dim(placement: Any, ndim: int) -> Any:
    if isinstance(placement, Replicate):
        return placement
    factor = getattr(placement, "split_factor", None)
    dim = placement.dim % ndim
    return Shard(dim) if factor is None else _StridedShard(dim, split_factor=factor)


def float_part(weight: Tensor, placement: Any, ranks: int, rank: int) -> Tensor:
    """Return what a rank holds of a float weight, by torch.chunk alone."""
    if isinstance(placement, Replicate):
        return weight
    packed = weight.chunk(getattr(placement, "split_factor", 1), placement.dim)
    return torch.cat([each.chunk(ranks, placement.dim)[rank] for each in packed], placement.dim)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("form", by_default([*KINDS, "int4_g32_columns"], FORMATS))
def test_a_part_stands_for_the_rows_and_columns_of_its_rank(form: str, ranks: int) -> None:
    for (shape, transposed), place in itertools.product(LAYOUTS.values(), PLACEMENTS.values()):
        assert_parts_of_the_whole(form, shape, transposed, place, ranks)


def assert_parts_of_the_whole(form: str, shape: tuple[int, ...], transposed: bool, place: Any, ranks: int) -> None:
    weight = weight_of(FORMATS[form], shape, transposed=transposed)
    for rank in range(ranks):
        with rank_of(ranks, rank):
            whole = placed(shape, place)
            try:
                part = cut(weight, whole)
            except UnsupportedError:
                assert not fits(weight.format, transposed, shape, place, ranks)
                continue
            expected = float_part(weight.dequantize(), place, ranks, rank)
            assert fits(weight.format, transposed, shape, place, ranks)
            assert (part.shape, part.format, part.transposed) == (expected.shape, weight.format, transposed)
            assert torch.equal(part.dequantize(), expected)
            part.format.check(part.tensors, part.stored_shape)
            assert all(tensor.is_contiguous() for tensor in part.tensors.values())


def fits(form: Format, transposed: bool, shape: tuple[int, ...], placement: Any, ranks: int) -> bool:
    """Return whether every piece of a row has whole groups."""
    if isinstance(placement, Replicate):
        return True
    reduced = len(shape) - 2 if transposed else len(shape) - 1
    dim, factor = placement.dim % len(shape), getattr(placement, "split_factor", 1)
    piece = shape[dim] // factor // ranks
    if dim == reduced:
        return form.has_cuttable_columns and piece % form.column_step == 0
    return piece > 0


QUANTIZED = [name for name, form in FORMATS.items() if form.has_cuttable_columns and not form.is_import_only]


@pytest.mark.slow
@pytest.mark.parametrize("form", by_default([*KINDS, "int4_g32_columns"], QUANTIZED))
def test_a_part_that_has_its_own_codes_is_quantized_to_those_of_the_whole(form: str) -> None:
    for layout, placement in itertools.product(LAYOUTS.values(), ("first", "last", "packed_before_last")):
        assert_own_codes_are_those_of_the_whole(form, *layout, PLACEMENTS[placement])


def assert_own_codes_are_those_of_the_whole(form: str, shape: tuple[int, ...], transposed: bool, place: Any) -> None:
    dense = random_weight(*shape)
    weight = QuantizedTensor.quantize(dense, FORMATS[form], transposed)
    for rank in range(2):
        with rank_of(2, rank):
            whole = placed(shape, place)
            part = cut(weight, whole)
            own = QuantizedTensor.quantize(float_part(dense, place, 2, rank), FORMATS[form], transposed)
            same = same_stored(own, part)
            assert same or not has_own_codes(Placed("weight", weight.format, transposed, whole))


def test_a_row_that_is_cut_shares_its_scale_and_other_rows_do_not() -> None:
    with rank_of(2, 0):
        rows, columns = placed((8, 512), Shard(0)), placed((8, 512), Shard(1))
        for form, expected in (("int8", [True, False]), ("int8_g32", [True, True]), ("int4", [True, True])):
            assert [has_own_codes(Placed("w", FORMATS[form], False, whole)) for whole in (rows, columns)] == expected


def test_rows_that_do_not_divide_leave_the_last_rank_fewer() -> None:
    weight = QuantizedTensor.quantize(random_weight(7, 64), FORMS["int8"])
    parts = []
    for rank in range(3):
        with rank_of(3, rank):
            parts.append(cut(weight, placed((7, 64), Shard(0))).dequantize())
    assert [len(part) for part in parts] == [3, 3, 1]
    assert torch.equal(torch.cat(parts), weight.dequantize())


def test_a_mesh_of_two_dimensions_cuts_twice() -> None:
    weight = QuantizedTensor.quantize(random_weight(8, 512), FORMS["int4"])
    for rank in range(4):
        with rank_of(4, rank):
            part = cut(weight, placed((8, 512), Shard(0), Shard(1), mesh_shape=(2, 2)))
            expected = weight.dequantize().chunk(2, 0)[rank // 2].chunk(2, 1)[rank % 2]
            assert torch.equal(part.dequantize(), expected)


@pytest.mark.parametrize(
    ("form", "shape", "place", "found"),
    [
        ("int4", (8, 128), Shard(1), r"found a part of \(8, 64\) of \[\*, N, K\] = \(8, 128\)"),
        ("int8_g32", (8, 96), Shard(1), r"found a part of \(8, 48\) of \[\*, N, K\] = \(8, 96\)"),
        ("int8", (1, 64), Shard(0), r"found a part of \(0, 64\) of \[\*, N, K\] = \(1, 64\)"),
    ],
)
def test_every_rank_refuses_what_it_or_another_cannot_hold(form: str, shape: Any, place: Any, found: str) -> None:
    for rank in range(2):
        with rank_of(2, rank):
            whole = Placed("layers.0.o_proj.weight", FORMATS[form], False, placed(shape, place), "the style 'rowwise'")
            with pytest.raises(UnsupportedError, match=found) as raised:
                check_parts(whole)
    assert "layers.0.o_proj.weight: expected a weight in" in str(raised.value)
    assert "that the style 'rowwise' can cut for 2 ranks between its groups" in str(raised.value)


def test_the_local_tensor_is_the_very_object_that_is_held() -> None:
    with rank_of(2, 1):
        whole = placed((8, 512), Shard(0))
        parameter = with_local(whole, cut(QuantizedTensor.quantize(random_weight(8, 512), FORMS["int8"]), whole))
        with torch.enable_grad():
            assert local_tensor(parameter) is local_tensor(parameter)
        assert is_distributed(parameter)
        assert (parameter.shape, parameter.placements) == (whole.shape, whole.placements)
    plain = torch.zeros(1)
    assert local_tensor(plain) is plain
    assert not is_distributed(plain)
