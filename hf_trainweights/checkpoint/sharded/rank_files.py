"""The two files of one rank: weights, as differences to anchors or as an anchor, and what it stores beside them.

The others are states of optimizers, and objects as torch.save wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from zlib_ng import zlib_ng

from hf_trainweights.checkpoint.dcp.description import Place, StoredFile, StoredItem, name_of, stored_item
from hf_trainweights.checkpoint.encoded.decoder import Anchor
from hf_trainweights.checkpoint.encoded.encoder import EncodedFile, encode_file
from hf_trainweights.checkpoint.encoded.storage_tasks import Plan
from hf_trainweights.checkpoint.encoded.structure import TensorReport
from hf_trainweights.checkpoint.run.anchors import delta_rms
from hf_trainweights.checkpoint.sharded.items import Item, Joiner, split_moments
from hf_trainweights.checkpoint.sharded.rank_items import AdamStates, RankItems, on_cpu, second_of
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
    if anchor and found:
        written, file = _write_differences(rank, found, anchor.step_rms)
    else:
        written, file = _write_full(rank)
    return [replace(each, file=file) for each in written]


def _write_once(rank: RankItems, write: Callable[[WriteItem, Tensor], StoredItem]) -> list[StoredItem]:
    """Write each weight, but of those with the same elements only the first."""
    written: dict[MetadataIndex, StoredItem] = {}
    for item, first, tensor in rank.with_firsts(rank.weights):
        is_new = item is first
        written[item.index] = write(item, on_cpu(tensor)) if is_new else _repeated(written[first.index], item)
    return list(written.values())


def _repeated(stored: StoredItem, item: WriteItem) -> StoredItem:
    """Return the result of an item with the same bytes as one that is stored."""
    row = {**stored.row, "path": item.index.fqn, "bytes_in": 0, "bytes_out": 0}
    return replace(stored, index=item.index, row=row, elements=0)


def _write_full(rank: RankItems) -> tuple[list[StoredItem], StoredFile]:
    """Write an anchor."""
    path, states = rank.directory / rank.orders.weights_name, AdamStates(rank)

    def write(item: WriteItem, tensor: Tensor) -> StoredItem:
        encoded = _encode_full(rank, item, tensor, states)
        each = Item.of(encoded)
        place = _place(path.name, joiner.add(name_of(item), each), each.content)
        return stored_item(item, place, encoded.report[0])

    with replace_file(path) as file:
        digested = DigestedFile(file)
        joiner = Joiner(digested)
        written = _write_once(rank, write)
        joiner.finish()
    return written, StoredFile(path.name, digested.size_bytes, digested.sha256(), is_anchor=True)


def _encode_full(rank: RankItems, item: WriteItem, tensor: Tensor, states: AdamStates) -> EncodedFile:
    plan, name = rank.orders.plans[item.index.fqn], name_of(item)
    drift: float | None = None
    # Planned as differences to anchors that are gone, it is exact: nothing says which weights may be rounded alone.
    if plan.steps_per_rms and rank.orders.anchor is None:
        drift = rank.orders.drift_rms.get(name) if rank.orders.drift_rms else states.drift_rms(item)
    return encode_file(tensor, {(): replace(plan.with_steps(drift or 0.0), anchor=None)})


def _write_differences(
    rank: RankItems, found: Mapping[str, Anchor], step_rms: Mapping[str, float]
) -> tuple[list[StoredItem], StoredFile]:
    path, states = rank.directory / rank.orders.weights_name, AdamStates(rank)

    def write(item: WriteItem, tensor: Tensor) -> StoredItem:
        plan, name = rank.orders.plans[item.index.fqn], name_of(item)
        anchor, measured = found.get(name), None
        rms = step_rms.get(name)
        if plan.steps_per_rms and anchor is not None and rms is None:
            rms = measured = delta_rms(tensor, name, anchor) or 0.0  # which leaves it exact
        plan = replace(plan.with_steps(rms or 0.0), anchor=plan.anchor and name)
        # A live moment may have to come from a GPU first.
        helps = any("exp_avg_sq" in codec.hints for codec in plan.candidates)
        hints = states.second_moment(item) if helps else None
        options = {"anchor": anchor, "anchor_directory": rank.directory, "second_moments": hints}
        encoded = encode_file(tensor, {(): plan}, **options)
        of_anchor = {"anchor_sha256": encoded.anchor_sha256, "delta_rms": measured}
        return target.put(item, Item.of(encoded).content, encoded.report[0], **of_anchor)

    with replace_file(path) as file:
        target = _Target(path.name, DigestedFile(file))
        written = _write_once(rank, write)
    digests = tuple(sorted({anchor.sha256 for anchor in found.values()}))
    return written, StoredFile(path.name, target.file.size_bytes, target.file.sha256(), anchors=digests)


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
    small: dict[bytes, StoredItem] = field(default_factory=dict)

    def put(self, item: WriteItem, data: bytes | memoryview, report: TensorReport, **of_anchor: Any) -> StoredItem:
        """Write an item."""
        place = _place(self.name, self.file.size_bytes, data)
        self.file.write(data)
        return stored_item(item, place, report, **of_anchor)

    def put_once(self, item: WriteItem, data: bytes | memoryview, report: TensorReport) -> StoredItem:
        """Write an item, unless the same bytes are there already."""
        key = bytes(data) if len(data) <= _REPEATED_BYTES else None
        if key in self.small:
            return _repeated(stored_item(item, self.small[key].storage_data, report), item)
        stored = self.put(item, data, report)
        if key is not None:
            self.small[key] = stored
        return stored


def _place(name: str, start: int, data: bytes | memoryview) -> Place:
    return Place(name, start, start + len(data), zlib_ng.crc32(data))


def _units(rank: RankItems) -> Iterator[list[WriteItem]]:
    """Yield every item once, a first moment that is stored in terms of the second together with it."""
    items = {(item.index.fqn, item.index.offset): item for item in rank.others}
    pairs = {key: second for key, item in items.items() if (second := second_of(item, rank.plan(item))) in items}
    seconds = set(pairs.values())
    for key, item in items.items():
        if key not in seconds:
            yield [item, items[pairs[key]]] if key in pairs else [item]


def _write_one(rank: RankItems, item: WriteItem, target: _Target) -> StoredItem:
    plan = rank.plan(item)
    if plan is None:
        data, name = rank.data(item), item.index.fqn
        return target.put_once(
            item, data, TensorReport(name, name, "other", _OBJECT_CODEC, {}, None, len(data), len(data))
        )
    encoded = encode_file(rank.tensor(item), {(): plan})
    return target.put_once(item, Item.of(encoded).content, encoded.report[0])


def _write_moments(rank: RankItems, items: list[WriteItem], target: _Target) -> list[StoredItem]:
    first, second = items
    plan = replace(rank.orders.plans[first.index.fqn], exp_avg_sq=("exp_avg_sq",))
    plans: Plan = {("exp_avg_sq",): rank.orders.plans[second.index.fqn], ("exp_avg",): plan}
    square, mean = rank.tensor(second), rank.tensor(first)
    if square.untyped_storage().data_ptr() == mean.untyped_storage().data_ptr():
        mean = mean.clone()  # views of one memory would be one storage of the file
    encoded = encode_file({"exp_avg_sq": square, "exp_avg": mean}, plans)
    mean, square, offset = split_moments(encoded)
    of_square, of_mean = encoded.report
    if offset is None:
        return [target.put_once(second, square.content, of_square), target.put_once(first, mean.content, of_mean)]
    outer = target.put_once(first, mean.content, of_mean)
    place = _place(target.name, outer.storage_data.start + offset, square.content)
    return [outer, stored_item(second, place, of_square)]
