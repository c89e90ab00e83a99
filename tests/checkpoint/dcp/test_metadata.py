"""Whether shards fill a tensor, compared with a count of every element."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from hf_trainweights.checkpoint.dcp.metadata import fill_whole

Box = tuple[Sequence[int], Sequence[int]]


def filled(size: Sequence[int], boxes: Sequence[Box]) -> bool:
    return fill_whole(size, [ChunkStorageMetadata(torch.Size(each), torch.Size(sizes)) for each, sizes in boxes])


def counted(size: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Return the same by looking at every element of a tensor with a margin for what lies outside."""
    count = torch.zeros([length + 8 for length in size], dtype=torch.int64)
    for offsets, sizes in boxes:
        count[tuple(slice(start, start + length) for start, length in zip(offsets, sizes, strict=True))] += 1
    inside = tuple(slice(length) for length in size)
    return bool((count[inside] == 1).all()) and int(count.sum()) == int(count[inside].sum())


def cut(box: Box, pick: random.Random, depth: int) -> list[Box]:
    """Cut a box into some that fill it, by planes anywhere."""
    offsets, sizes = box
    if depth == 0 or pick.random() < 0.2:
        return [box]
    dimension = pick.randrange(len(sizes))
    at = pick.randint(0, sizes[dimension])
    first, second = list(sizes), list(sizes)
    first[dimension], second[dimension] = at, sizes[dimension] - at
    start = list(offsets)
    start[dimension] += at
    return [*cut((offsets, first), pick, depth - 1), *cut((start, second), pick, depth - 1)]


@pytest.mark.slow
@pytest.mark.parametrize("size", [(5,), (4, 3), (0, 3), (3, 4, 2)], ids=str)
def test_boxes_that_were_cut_from_a_tensor_fill_it_until_one_is_moved_or_missing(size: Sequence[int]) -> None:
    pick = random.Random(0)
    for _ in range(100):
        boxes = cut(([0] * len(size), size), pick, 4)
        pick.shuffle(boxes)
        assert filled(size, boxes)
        number, dimension = pick.randrange(len(boxes)), pick.randrange(len(size))
        offsets = list(boxes[number][0])
        offsets[dimension] += 1
        moved = [*boxes[:number], (offsets, boxes[number][1]), *boxes[number + 1 :]]
        for wrong in (moved, boxes[:number] + boxes[number + 1 :], [*boxes, boxes[number]]):
            assert filled(size, wrong) == counted(size, wrong)


def test_a_pinwheel_which_no_plane_divides_fills_a_square() -> None:
    pinwheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    assert filled((3, 3), pinwheel)
    assert not filled((3, 3), pinwheel[:4])


def test_a_tensor_without_dimensions_is_filled_by_one_shard() -> None:
    assert filled((), [((), ())])
    assert not filled((), [((), ())] * 2)
    assert not filled((), [])


def test_shards_of_other_dimensions_and_of_too_many_fill_nothing() -> None:
    assert not filled((6,), [((0, 0), (2, 3))])
    size = (2,) * 40  # of a hostile file: 2**40 corners
    assert not filled(size, [((0,) * 40, (1,) * 40)])
