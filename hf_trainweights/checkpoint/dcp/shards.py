"""Names of shards: which part of which tensor, as a slice of the whole one.

`0:64,128:256` is rows 0 to 63 of columns 128 to 255. A tensor without dimensions has the empty text, an object none.
The name of a shard in an anchor is `model.embed.weight[0:64,128:256]`: a tensor that is cut otherwise has another name,
and therefore no reference.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from hf_trainweights.checkpoint.encoded.storages import corrupt

# A mesh of devices has fewer dimensions; with each, a shard has twice as many corners.
_MOST_CUT_DIMENSIONS = 8

_RANGE = re.compile(r"(0|[1-9]\d{0,17}):(0|[1-9]\d{0,17})")


def shard_text(offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """Return a shard as text, from where it begins in the whole tensor and its shape.

    Examples:
        >>> shard_text((0, 128), (64, 128))
        '0:64,128:256'
    """
    return ",".join(f"{start}:{start + size}" for start, size in zip(offsets, sizes, strict=True))


def parse_shard(where: str, text: str) -> tuple[list[int], list[int]]:
    """Return the offsets and sizes of a shard; CorruptFileError if `text` only pretends to be one."""
    ranges = [parse_range(where, part) for part in text.split(",")] if text else []
    return [start for start, _ in ranges], [stop - start for start, stop in ranges]


def parse_range(where: str, text: str) -> tuple[int, int]:
    """Return start and stop of a range such as `128:256`; CorruptFileError if it is none, or stops before it starts."""
    match = _RANGE.fullmatch(text)
    if match is None or int(match[2]) < int(match[1]):
        raise corrupt(where, "a range such as 0:64", text)
    return int(match[1]), int(match[2])


def shard_of(item: WriteItem) -> str | None:
    """Return which part of its tensor an item of a plan is; None for an object."""
    data = item.tensor_data
    return None if data is None else shard_text(data.chunk.offsets, data.chunk.sizes)


def shard_name(fqn: str, shard: str) -> str:
    """Return the name of a shard in an anchor."""
    return f"{fqn}[{shard}]"


def name_of(item: WriteItem) -> str:
    """Return the name of an item of a tensor in an anchor."""
    return shard_name(item.index.fqn, shard_of(item) or "")


def fill_whole(size: Sequence[int], shards: Iterable[ChunkStorageMetadata]) -> bool:
    """Return whether shards fill a tensor of that shape, no element twice; each of them is looked at once.

    Give the corners of a box the signs of a chess board. Where boxes lie side by side, the signs of the corners that
    meet add up to 0, so a filled box shows its own corners alone. Any overlap or hole leaves others.
    """
    boxes = [(shard.offsets, shard.sizes) for shard in shards]
    if any(len(offsets) != len(size) for offsets, _ in boxes):
        return False
    cut = [i for i, length in enumerate(size) if any((each[i], sizes[i]) != (0, length) for each, sizes in boxes)]
    if len(cut) > _MOST_CUT_DIMENSIONS:
        return False
    signs: Counter[tuple[int, ...]] = Counter()
    for sign, offsets, sizes in [*((1, *box) for box in boxes), (-1, [0] * len(size), size)]:
        if math.prod(sizes):
            ends = [((offsets[i], 1), (offsets[i] + sizes[i], -1)) for i in cut]
            for corner in itertools.product(*ends):
                signs[tuple(place for place, _ in corner)] += sign * math.prod(each for _, each in corner)
    return not any(signs.values())
