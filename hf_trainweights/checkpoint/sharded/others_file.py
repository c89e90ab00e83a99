"""The file of what one rank stores beside weights: the states of optimizers, and objects as torch.save wrote them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from hf_trainweights.checkpoint.dcp.items import Item, item_crc32, split_moments
from hf_trainweights.checkpoint.dcp.results import StoredFile, StoredItem, Written
from hf_trainweights.checkpoint.encoded.encoder import TensorReport, encode_file
from hf_trainweights.checkpoint.encoded.key_paths import KeyPath
from hf_trainweights.checkpoint.encoded.plan import TensorPlan
from hf_trainweights.checkpoint.sharded.rank_items import RankItems
from hf_trainweights.files.atomic import replace_file
from hf_trainweights.files.sha256 import DigestedFile

# Steps, learning rates and the like are the same for most parameters; items up to this length are stored once.
_REPEATED_BYTES = 4096


def write_others(rank: RankItems) -> list[StoredItem]:
    """Write all that one rank stores beside weights; UnstorableError names what cannot be stored."""
    if not rank.others:
        return []
    path = rank.directory / rank.orders.others_name
    written: list[Written] = []
    with replace_file(path) as file:
        target = _Target(DigestedFile(file))
        for items in _units(rank):
            written += _write_moments(rank, items, target) if len(items) == 2 else [_write_one(rank, items[0], target)]
    stored = StoredFile(path.name, target.file.size_bytes, target.file.sha256())
    return [each.stored(stored) for each in written]


@dataclass
class _Target:
    """The file, and where in it the small items are."""

    file: DigestedFile
    starts: dict[bytes, int] = field(default_factory=dict)

    def put(self, data: Tensor | bytes) -> tuple[int, bool]:
        """Write an item unless it is there already; return where it begins, and whether it was there."""
        view = data if isinstance(data, bytes) else data.numpy().data
        key = bytes(view) if len(view) <= _REPEATED_BYTES else None
        if key in self.starts:
            return self.starts[key], True
        start = self.file.size_bytes
        self.file.write(view)
        if key is not None:
            self.starts[key] = start
        return start, False


def _units(rank: RankItems) -> Iterator[list[WriteItem]]:
    """Yield every item once, a first moment that is stored in terms of the second together with it."""
    by_place: Mapping[object, WriteItem] = {(item.index.fqn, item.index.offset): item for item in rank.others}
    pairs = {}
    for item in rank.others:
        order = rank.order(item)
        second = by_place.get((f"{item.index.fqn}_sq", item.index.offset))
        if second is not None and order is not None and order.plan.exp_avg_sq is not None:
            pairs[id(item)] = second
    seconds = {id(second) for second in pairs.values()}
    for item in rank.others:
        if id(item) in pairs:
            yield [item, pairs[id(item)]]
        elif id(item) not in seconds:
            yield [item]


def _write_one(rank: RankItems, item: WriteItem, target: _Target) -> Written:
    order = rank.order(item)
    if order is None:
        data = rank.data(item)
        start, is_repeated = target.put(data)
        return Written(item, start, len(data), zlib.crc32(data), is_repeated=is_repeated)
    encoded = encode_file(rank.tensor(item), {(): replace(order.plan, exp_avg_sq=None)})
    return _put(item, Item.of(encoded), encoded.report[0], target)


def _write_moments(rank: RankItems, items: list[WriteItem], target: _Target) -> list[Written]:
    first, second = items
    plans = {item.index.fqn: rank.orders.orders[item.index.fqn].plan for item in items}
    plan: dict[KeyPath, TensorPlan] = {
        ("exp_avg_sq",): plans[second.index.fqn],
        ("exp_avg",): replace(plans[first.index.fqn], exp_avg_sq=("exp_avg_sq",)),
    }
    moments = {"exp_avg_sq": rank.tensor(second), "exp_avg": rank.tensor(first)}
    encoded = encode_file(moments, plan)
    mean, square, offset = split_moments(encoded)
    if offset is None:
        reports = encoded.report
        return [_put(second, square, reports[0], target), _put(first, mean, reports[1], target)]
    of_mean = _put(first, mean, encoded.report[1], target)
    report = replace(encoded.report[0], path=second.index.fqn)
    of_square = Written(second, of_mean.start + offset, square.size_bytes, item_crc32(square.data), report)
    return [of_mean, of_square]


def _put(item: WriteItem, encoded: Item, report: TensorReport, target: _Target) -> Written:
    start, is_repeated = target.put(encoded.data)
    report = replace(report, path=item.index.fqn)
    return Written(item, start, encoded.size_bytes, item_crc32(encoded.data), report=report, is_repeated=is_repeated)
