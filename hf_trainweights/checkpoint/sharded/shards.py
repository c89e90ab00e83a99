"""Names of shards: which part of which tensor, as a slice of the whole one.

`0:64,128:256` is rows 0 to 63 of columns 128 to 255. A tensor without dimensions has the empty text, an object none.
The name of a shard in an anchor is `model.embed.weight[0:64,128:256]`: a tensor that is cut otherwise has another name,
and therefore no reference.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch.distributed.checkpoint.planner import WriteItem

from hf_trainweights.checkpoint.encoded.key_paths import corrupt

_RANGE = re.compile(r"(0|[1-9]\d{0,17}):(0|[1-9]\d{0,17})")


def shard_text(offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """Return a shard as text.

    Args:
        offsets: Where it begins in the whole tensor, per dimension.
        sizes: Its shape.

    Examples:
        >>> shard_text((0, 128), (64, 128))
        '0:64,128:256'
    """
    return ",".join(f"{start}:{start + size}" for start, size in zip(offsets, sizes, strict=True))


def parse_shard(where: str, text: str) -> tuple[list[int], list[int]]:
    """Return the offsets and sizes of a shard.

    Args:
        where: Where the text stands, for errors.
        text: What `shard_text` returned, or anything that pretends to be it.

    Raises:
        CorruptFileError: It is no such text.

    Examples:
        >>> parse_shard("", "0:64,128:256")
        ([0, 128], [64, 128])
    """
    ranges = [parse_range(where, part) for part in text.split(",")] if text else []
    return [start for start, _ in ranges], [stop - start for start, stop in ranges]


def parse_range(where: str, text: str) -> tuple[int, int]:
    """Return start and stop of a range such as `128:256`.

    Raises:
        CorruptFileError: It is no such text, or stops before it starts.
    """
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
