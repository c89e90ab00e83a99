"""The two files of one rank: weights, as differences to anchors or as an anchor, and what it stores beside them.

The others are states of optimizers, and objects as torch.save wrote them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed.checkpoint.planner import WriteItem
from zlib_ng import zlib_ng

from hf_trainweights.checkpoint.dcp.description import Place, StoredFile, StoredItem, name_of, stored_item
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
    by_index = {each.index: replace(each, file=file) for each in written}
    pairs = zip(items, firsts, strict=True)
    return [by_index[item.index] if item is first else _repeated(by_index[first.index], item) for item, first in pairs]


def _repeated(stored: StoredItem, item: WriteItem) -> StoredItem:
    """Return the result of an item with the same bytes as one that is stored."""
    row = {**stored.row, "path": item.index.fqn, "bytes_in": 0, "bytes_out": 0}
    return replace(stored, index=item.index, row=row, is_repeated=True)


def _write_full(rank: RankItems, items: list[WriteItem]) -> tuple[list[StoredItem], StoredFile]:
    """Write an anchor."""
    path = rank.directory / rank.orders.weights_name
    states, joined = AdamStates(rank), []
    with replace_file(path) as file:
        digested = DigestedFile(file)
        joiner = Joiner(digested)
        for item in items:
            encoded = _encode_full(rank, item, states)
            each = Item.of(encoded)
            joiner.add(name_of(item), each)
            joined.append((item, each.size_bytes, each.crc32, encoded.report[0]))
        starts = joiner.finish()
    with path.open("rb") as whole:
        payload = payload_start(whole)
    written = []
    for item, item_bytes, crc32, report in joined:
        start = payload + starts[name_of(item)]
        written.append(stored_item(item, Place(path.name, start, start + item_bytes, crc32), report))
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
) -> tuple[list[StoredItem], StoredFile]:
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
            digested.write(each.content)
            place = Place(path.name, start, digested.size_bytes, each.crc32)
            of_anchor = {"anchor_sha256": encoded.anchor_sha256, "delta_rms": measured}
            written.append(stored_item(item, place, encoded.report[0], **of_anchor))
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
    written: list[StoredItem] = []
    with replace_file(path) as file:
        target = _Target(path.name, DigestedFile(file))
        for items in _units(rank):
            written += _write_moments(rank, items, target) if len(items) == 2 else [_write_one(rank, items[0], target)]
    stored = StoredFile(path.name, target.file.size_bytes, target.file.sha256())
    return [replace(each, file=stored) for each in written]


@dataclass
class _Target:
    """The file under its name, and where in it the small items are."""

    name: str
    file: DigestedFile
    starts: dict[bytes, int] = field(default_factory=dict)

    def put(self, item: WriteItem, data: bytes | memoryview, report: TensorReport) -> StoredItem:
        """Write an item, unless the same bytes are there already."""
        key = bytes(data) if len(data) <= _REPEATED_BYTES else None
        start = None if key is None else self.starts.get(key)
        is_repeated = start is not None
        if start is None:
            start = self.file.size_bytes
            self.file.write(data)
            if key is not None:
                self.starts[key] = start
        place = Place(self.name, start, start + len(data), zlib_ng.crc32(data))
        stored = stored_item(item, place, report)
        return _repeated(stored, item) if is_repeated else stored


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


def _write_one(rank: RankItems, item: WriteItem, target: _Target) -> StoredItem:
    plan = rank.plan(item)
    if plan is None:
        data, name = rank.data(item), item.index.fqn
        return target.put(item, data, TensorReport(name, name, "other", _OBJECT_CODEC, {}, None, len(data), len(data)))
    encoded = encode_file(rank.tensor(item), {(): replace(plan, exp_avg_sq=None)})
    return target.put(item, Item.of(encoded).content, encoded.report[0])


def _write_moments(rank: RankItems, items: list[WriteItem], target: _Target) -> list[StoredItem]:
    first, second = items
    plans = {item.index.fqn: rank.orders.plans[item.index.fqn] for item in items}
    plan: dict[KeyPath, TensorPlan] = {
        ("exp_avg_sq",): plans[second.index.fqn],
        ("exp_avg",): replace(plans[first.index.fqn], exp_avg_sq=("exp_avg_sq",)),
    }
    moments = {"exp_avg_sq": rank.tensor(second), "exp_avg": rank.tensor(first)}
    encoded = encode_file(moments, plan)
    mean, square, offset = split_moments(encoded)
    of_square, of_mean = encoded.report
    if offset is None:
        return [target.put(second, square.content, of_square), target.put(first, mean.content, of_mean)]
    outer = target.put(first, mean.content, of_mean)
    start = outer.storage_data.start + offset
    place = Place(target.name, start, start + square.size_bytes, square.crc32)
    return [outer, stored_item(second, place, of_square)]
