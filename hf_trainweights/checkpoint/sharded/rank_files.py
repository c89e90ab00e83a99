"""The two files of one rank: weights, as differences to anchors or as an anchor, and what it stores beside them.

The others are states of optimizers, and objects as torch.save wrote them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem
from zlib_ng import zlib_ng

from hf_trainweights.checkpoint.dcp.description import StoredFile, StoredItem, Written
from hf_trainweights.checkpoint.dcp.shards import name_of
from hf_trainweights.checkpoint.encoded.anchor import Anchor
from hf_trainweights.checkpoint.encoded.encoder import EncodedFile, TensorReport, encode_file
from hf_trainweights.checkpoint.encoded.plan import TensorPlan
from hf_trainweights.checkpoint.encoded.storages import KeyPath
from hf_trainweights.checkpoint.run.anchors import delta_rms
from hf_trainweights.checkpoint.sharded.items import Item, Joiner, payload_start, split_moments
from hf_trainweights.checkpoint.sharded.rank_items import AdamStates, RankItems
from hf_trainweights.files.atomic import replace_file
from hf_trainweights.files.reading import DigestedFile

# Steps, learning rates and the like are the same for most parameters; items up to this length are stored once.
_REPEATED_BYTES = 4096
# What stands as the codec of an object, which is kept as torch.save wrote it.
_OBJECT_CODEC = "torch.save"


def write_weights(rank: RankItems) -> list[StoredItem]:
    """Write the weights and buffers of one rank; UnstorableError names what cannot be stored."""
    items = rank.weights
    if not items:
        return []
    anchor = rank.orders.anchor
    # All of them at first: those that are gone decide whether this file is to be an anchor.
    found = anchor.open(map(name_of, items), rank.directory) if anchor else {}
    firsts = rank.firsts(items)
    own = [item for item, first in zip(items, firsts, strict=True) if item is first]
    if anchor and found:
        written, file = _write_differences(rank, own, found, anchor.step_rms)
    else:
        written, file = _write_full(rank, own)
    by_index = {each.item.index: each for each in written}
    results = []
    for item, first in zip(items, firsts, strict=True):
        each = by_index[first.index]
        results.append((each if item is first else replace(each, item=item, is_repeated=True)).stored(file))
    return results


def _write_full(rank: RankItems, items: list[WriteItem]) -> tuple[list[Written], StoredFile]:
    """Write an anchor."""
    path = rank.directory / rank.orders.weights_name
    states, written = AdamStates(rank), []
    with replace_file(path) as file:
        digested = DigestedFile(file)
        joiner = Joiner(digested)
        for item in items:
            encoded = _encode_full(rank, item, states)
            each = Item.of(encoded)
            joiner.add(name_of(item), each)
            written.append(Written(item, 0, each.size_bytes, each.crc32, encoded.report[0]))
        starts = joiner.finish()
    with path.open("rb") as whole:
        start = payload_start(whole)
    written = [replace(each, start=start + starts[name_of(each.item)]) for each in written]
    return written, StoredFile(path.name, digested.size_bytes, digested.sha256(), is_anchor=True)


def _encode_full(rank: RankItems, item: WriteItem, states: AdamStates) -> EncodedFile:
    tensor, plan, name = rank.tensor(item), rank.orders.plans[item.index.fqn], name_of(item)
    drift: float | None = None
    # Planned as differences to anchors that are gone, it is exact: nothing says which weights may be rounded alone.
    if plan.steps_per_rms and rank.orders.anchor is None:
        drift = rank.orders.drift_rms.get(name) if rank.orders.drift_rms else states.drift_rms(item)
    return encode_file(tensor, {(): replace(plan.with_steps(drift or 0.0), anchor=None)})


def _write_differences(
    rank: RankItems, items: Iterable[WriteItem], found: Mapping[str, Anchor], step_rms: Mapping[str, float]
) -> tuple[list[Written], StoredFile]:
    path = rank.directory / rank.orders.weights_name
    written = []
    states = AdamStates(rank)
    with replace_file(path) as file:
        digested = DigestedFile(file)
        for item in items:
            tensor, plan, name = rank.tensor(item), rank.orders.plans[item.index.fqn], name_of(item)
            anchor, measured = found.get(name), None
            rms = step_rms.get(name)
            if plan.steps_per_rms and anchor is not None and rms is None:
                rms = measured = delta_rms(tensor, name, anchor) or 0.0  # which leaves it exact
            plan = replace(plan.with_steps(rms or 0.0), anchor=plan.anchor and name)
            options: dict[str, Any] = {"second_moments": states.second_moment(item)} if _takes(plan) else {}
            if anchor is not None:
                options |= {"anchor": anchor, "anchor_directory": rank.directory}
            encoded = encode_file(tensor, {(): plan}, **options)
            each = Item.of(encoded)
            start = digested.size_bytes
            digested.write(each.data.numpy().data)
            report, sha256 = encoded.report[0], encoded.anchor_sha256
            written.append(Written(item, start, each.size_bytes, each.crc32, report, sha256, measured))
    digests = tuple(sorted({anchor.sha256 for anchor in found.values()}))
    return written, StoredFile(path.name, digested.size_bytes, digested.sha256(), anchors=digests)


def _takes(plan: TensorPlan) -> bool:
    """Return whether a second moment helps to encode a weight; a live one may have to come from a GPU first."""
    return any("exp_avg_sq" in codec.hints for codec in plan.candidates)


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
        plan = rank.plan(item)
        second = by_place.get((f"{item.index.fqn}_sq", item.index.offset))
        if second is not None and plan is not None and plan.exp_avg_sq is not None:
            pairs[id(item)] = second
    seconds = {id(second) for second in pairs.values()}
    for item in rank.others:
        if id(item) in pairs:
            yield [item, pairs[id(item)]]
        elif id(item) not in seconds:
            yield [item]


def _write_one(rank: RankItems, item: WriteItem, target: _Target) -> Written:
    plan = rank.plan(item)
    if plan is None:
        data = rank.data(item)
        start, is_repeated = target.put(data)
        name, size_bytes = item.index.fqn, len(data)
        report = TensorReport(name, name, "other", _OBJECT_CODEC, {}, None, size_bytes, size_bytes)
        return Written(item, start, size_bytes, zlib_ng.crc32(data), report, is_repeated=is_repeated)
    encoded = encode_file(rank.tensor(item), {(): replace(plan, exp_avg_sq=None)})
    return _put(item, Item.of(encoded), encoded.report[0], target)


def _write_moments(rank: RankItems, items: list[WriteItem], target: _Target) -> list[Written]:
    first, second = items
    plans = {item.index.fqn: rank.orders.plans[item.index.fqn] for item in items}
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
    start = of_mean.start + offset
    return [of_mean, Written(second, start, square.size_bytes, square.crc32, encoded.report[0])]


def _put(item: WriteItem, encoded: Item, report: TensorReport, target: _Target) -> Written:
    start, is_repeated = target.put(encoded.data)
    return Written(item, start, encoded.size_bytes, encoded.crc32, report, is_repeated=is_repeated)
