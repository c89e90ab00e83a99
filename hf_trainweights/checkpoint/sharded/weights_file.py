"""The file of one rank's weights: differences to anchors, or a full one that is an anchor itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from hf_trainweights.checkpoint.codecs.delta_uniform import rms_difference
from hf_trainweights.checkpoint.dcp.items import Item, Joiner, item_crc32, payload_start
from hf_trainweights.checkpoint.dcp.results import StoredFile, StoredItem, Written
from hf_trainweights.checkpoint.encoded.anchor import Anchor
from hf_trainweights.checkpoint.encoded.anchor_files import anchor_file_name
from hf_trainweights.checkpoint.encoded.encoder import EncodedFile, TensorReport, encode_file
from hf_trainweights.checkpoint.encoded.plan import TensorPlan
from hf_trainweights.checkpoint.sharded.anchors import OpenAnchors
from hf_trainweights.checkpoint.sharded.drift import AdamStates
from hf_trainweights.checkpoint.sharded.rank_items import RankItems, name_of
from hf_trainweights.files.atomic import replace_file
from hf_trainweights.files.sha256 import DigestedFile


def write_weights(rank: RankItems) -> list[StoredItem]:
    """Write the weights and buffers of one rank; UnstorableError names what cannot be stored."""
    items = rank.weights
    if not items:
        return []
    anchors = OpenAnchors(rank.orders.anchor, rank.directory) if rank.orders.anchor else None
    # All of them at first: those that are gone decide whether this file is to be an anchor.
    found = {name_of(item): anchors.find(name_of(item)) for item in items} if anchors else {}
    twins = rank.twins(items)
    firsts = [item for item in items if twins[name_of(item)] == name_of(item)]
    if anchors and anchors.digests():
        written, file = _write_differences(rank, firsts, found, anchors)
        shift = 0
    else:
        written, file, shift = _write_full(rank, firsts)
    by_name = {name_of(each.item): each for each in written}
    results = []
    for item in items:
        first = by_name[twins[name_of(item)]]
        each = first if item is first.item else replace(first, item=item, is_repeated=True)
        results.append(each.stored(file, shift))
    return results


def _write_full(rank: RankItems, items: list[WriteItem]) -> tuple[list[Written], StoredFile, int]:
    """Write an anchor; return also where its payload begins."""
    path = rank.directory / rank.orders.weights_name
    sizes, reports = {}, {}
    states = AdamStates(rank)
    with replace_file(path) as file:
        digested = DigestedFile(file)
        joiner = Joiner(digested)
        for item in items:
            encoded = _encode_full(rank, item, states)
            each = Item.of(encoded)
            joiner.add(name_of(item), each)
            sizes[name_of(item)] = each.size_bytes, item_crc32(each.data)
            reports[name_of(item)] = _named(encoded, item)
        starts = joiner.finish()
    with path.open("rb") as whole:
        start = payload_start(whole)
    written = [
        Written(item, starts[name_of(item)], *sizes[name_of(item)], report=reports[name_of(item)]) for item in items
    ]
    return written, StoredFile(path.name, digested.size_bytes, digested.sha256(), is_anchor=True), start


def _encode_full(rank: RankItems, item: WriteItem, states: AdamStates) -> EncodedFile:
    tensor, order, name = rank.tensor(item), rank.orders.orders[item.index.fqn], name_of(item)
    drift: float | None = None
    # Planned as differences to anchors that are gone, it is exact: nothing says which weights may be rounded alone.
    if order.lossy is not None and rank.orders.anchor is None:
        drift = rank.orders.drift_rms.get(name) if rank.orders.drift_rms else states.drift_rms(item)
    plan = replace(order.shard_plan(name, drift or 0.0), anchor=None)
    return encode_file(tensor, {(): plan})


def _write_differences(
    rank: RankItems, items: Iterable[WriteItem], found: dict[str, Anchor | None], anchors: OpenAnchors
) -> tuple[list[Written], StoredFile]:
    path = rank.directory / rank.orders.weights_name
    written = []
    states = AdamStates(rank)
    with replace_file(path) as file:
        digested = DigestedFile(file)
        for item in items:
            tensor, order, name = rank.tensor(item), rank.orders.orders[item.index.fqn], name_of(item)
            anchor, measured = found[name], None
            rms = anchors.step_rms.get(name)
            if order.lossy and anchor is not None and rms is None:
                rms = measured = _measure_rms(tensor, anchor, name)
            plan = order.shard_plan(name, rms or 0.0)
            encoded = _encode_difference(rank, tensor, plan, anchor, states.second_moment(item) if _takes(plan) else {})
            each = Item.of(encoded)
            start = digested.size_bytes
            digested.write(each.data.numpy().data)
            crc32, report = item_crc32(each.data), _named(encoded, item)
            written.append(Written(item, start, each.size_bytes, crc32, report, encoded.anchor_sha256, measured))
    return written, StoredFile(path.name, digested.size_bytes, digested.sha256(), anchors=anchors.digests())


def _encode_difference(
    rank: RankItems, tensor: Tensor, plan: TensorPlan, anchor: Anchor | None, moments: Mapping[str, Tensor]
) -> EncodedFile:
    link = rank.directory / anchor_file_name(anchor.sha256) if anchor else None
    return encode_file(tensor, {(): plan}, anchor=anchor, anchor_link=link, second_moments=moments)


def _takes(plan: TensorPlan) -> bool:
    """Return whether a second moment helps to encode a weight; a live one may have to come from a GPU first."""
    return any("exp_avg_sq" in codec.hints for codec in plan.candidates)


def _measure_rms(tensor: Tensor, anchor: Anchor, name: str) -> float:
    """Measure how far a shard has moved; 0, which leaves it exact, where that is no number."""
    if name not in anchor:
        return 0.0
    reference = anchor.tensor(name)
    rms = rms_difference(tensor, reference) if reference.shape == tensor.shape else math.nan
    return rms if math.isfinite(rms) else 0.0


def _named(encoded: EncodedFile, item: WriteItem) -> TensorReport:
    return replace(encoded.report[0], path=item.index.fqn)
