"""The two files of one rank, one for weights and one for everything else, and the items in these `.distcp` files.

Each item is a torch zip file inside a `.distcp` file; its pickle is one call of `decode_file`. DCP's reader cuts the
bytes of one item out of a file and passes them to `torch.load`. Items follow each other, or they lie inside the payload
of another encoded file (encoded/structure.py). Then the outer structure lists the storages of the inner file as its
own. Readers of either file read the same bytes, and no byte is stored twice:

    | outer zip ... payload: | inner zip: head | pieces of the inner payload | tail | the next inner zip ... |

Head and tail are the bytes of the inner zip around its pieces. They count as storages that no tensor views. `_Joiner`
makes one encoded file of many items, with a flat state dict, which can be an anchor. `_split_moments` puts the zip of
exp_avg_sq into the zip of exp_avg, because exp_avg is decoded with it.
"""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from zlib_ng import zlib_ng

from hf_trainweights.checkpoint.dcp.metadata import ITEM_SUFFIX, Place
from hf_trainweights.checkpoint.encoded.decoder import Anchor
from hf_trainweights.checkpoint.encoded.encoder import EncodedFile, Payload, encode_file, pickled
from hf_trainweights.checkpoint.encoded.storage_tasks import Plan
from hf_trainweights.checkpoint.encoded.structure import (
    ALIGNMENT_BYTES,
    VERSION,
    TensorReport,
    cut_payload,
    open_structure,
    payload_crc32,
    seal_structure,
)
from hf_trainweights.checkpoint.manifest import FileEntry
from hf_trainweights.checkpoint.run.anchors import MOST_FILES, delta_rms, link_anchor
from hf_trainweights.checkpoint.sharded.index import StoredFile, StoredItem, name_of, stored_item
from hf_trainweights.checkpoint.sharded.rank_items import AdamStates, RankItems, is_weight, second_of
from hf_trainweights.files.atomic import replace_file
from hf_trainweights.files.reading import DigestedFile
from hf_trainweights.files.torch_zip import FIRST_RECORD_START, MemoryFile, Writable

# Steps, learning rates and the like are the same for most parameters; items up to this length are stored once.
_REPEATED_BYTES = 4096
# The codec that reports name for an object, whose bytes are stored as torch.save wrote them.
OBJECT_CODEC = "torch.save"

# The number of Unix in a zip archive: the bytes of a file are the same whichever system writes it.
_UNIX = 3
# Three records with short names take half as many bytes.
_MOST_HEADER_BYTES = 1024


def write_weights(rank: RankItems) -> list[StoredItem]:
    """Write the weights and buffers of one rank; UnstorableError names the one that cannot be stored.

    They are differences to anchors. If no anchor can be used, the file is an anchor itself. So is a rounded difference,
    as long as few files are needed to read it.
    """
    items, anchors = rank.weights, rank.orders.anchors
    if not items:
        return []
    # All anchors are linked first, because this file becomes an anchor only if all of them are gone.
    linked = {sha256: link_anchor(path, sha256, rank.directory) for sha256, path in sorted({*anchors.values()})}
    opened = {name: anchor for name, (sha256, _) in anchors.items() if (anchor := linked[sha256]) is not None}
    encode = partial(_encode_full, rank, AdamStates(rank))
    if opened:
        encode = partial(_encode_difference, rank, AdamStates(rank), opened)
    written: dict[MetadataIndex, StoredItem] = {}
    used = {anchor.sha256: anchor for anchor in opened.values()}
    is_anchor = not opened or _continues_chain(rank, [*used.values()])
    with _new_file(rank.directory / rank.orders.weights_name, is_anchor=is_anchor) as target:
        for item, first, tensor in rank.with_firsts(items):
            if item is first:
                written[item.index] = target.put(item, *encode(item, tensor.cpu().contiguous()))
            else:
                stored = written[first.index]
                row = {**stored.row, "path": item.index.fqn, "bytes_in": 0, "bytes_out": 0}
                written[item.index] = replace(stored, index=item.index, row=row, elements=0)
    return target.stored(written.values(), used.values())


def _continues_chain(rank: RankItems, anchors: Sequence[Anchor]) -> bool:
    """Return whether the weights of a rank, stored as differences to these anchors, become the next anchor."""
    is_exact = all(plan.is_lossless for plan in rank.orders.plans.values() if is_weight(plan))
    # An encoded file of several weights names one anchor.
    return not is_exact and len(anchors) == 1 and len(anchors[0].files) + 1 < MOST_FILES


def _encode_full(
    rank: RankItems, states: AdamStates, item: WriteItem, tensor: Tensor
) -> tuple[EncodedFile, float | None]:
    plan, name = rank.orders.plans[item.index.fqn], name_of(item)
    drift: float | None = None
    # Planned as a difference to an anchor that is gone, it stays exact: no plan says if it may be rounded alone.
    if plan.steps_per_rms and not rank.orders.anchors:
        drift = rank.orders.step_rms.get(name) if rank.orders.step_rms else states.drift_rms(item)
    return encode_file(tensor, {(): replace(plan.with_steps(drift or 0.0), anchor=None)}), None


def _encode_difference(
    rank: RankItems, states: AdamStates, anchors: Mapping[str, Anchor], item: WriteItem, tensor: Tensor
) -> tuple[EncodedFile, float | None]:
    """Encode a weight, and measure its distance to the anchor if no earlier save did."""
    plan, name = rank.orders.plans[item.index.fqn], name_of(item)
    anchor, rms, measured = anchors.get(name), rank.orders.step_rms.get(name), None
    if plan.steps_per_rms and anchor is not None and rms is None:
        rms = measured = delta_rms(tensor, name, anchor) or 0.0  # 0 leaves the weight exact
    plan = replace(plan.with_steps(rms or 0.0), anchor=plan.anchor and name)
    # The moment is fetched only if a codec uses it, because it may have to be copied from a GPU.
    is_moment_used = any("exp_avg_sq" in codec.hints for codec in plan.candidates)
    hints = states.second_moment(item) if is_moment_used else None
    options = {"anchor": anchor, "anchor_directory": rank.directory, "second_moments": hints}
    return encode_file(tensor, {(): plan}, **options), measured


def write_others(rank: RankItems) -> list[StoredItem]:
    """Write all items of one rank except weights; UnstorableError names the item that cannot be stored."""
    items = {item.index: item for item in rank.others}
    if not items:
        return []
    seconds = {second_of(item, rank.plan(item)) for item in items.values()}
    written: list[StoredItem] = []
    with _new_file(rank.directory / rank.orders.others_name) as target:
        for item in items.values():
            second = second_of(item, rank.plan(item))
            if second in items:
                written += _write_moments(rank, item, items[second], target)
            elif item.index not in seconds:
                written.append(_write_one(rank, item, target))
    return target.stored(written)


def _write_one(rank: RankItems, item: WriteItem, target: _RankFile) -> StoredItem:
    plan = rank.plan(item)
    if plan is None:
        data, name = rank.data(item), item.index.fqn
        report = TensorReport(name, name, "other", OBJECT_CODEC, {}, None, len(data), len(data))
        return target.put_once(item, data, report)
    encoded = encode_file(rank.tensor(item), {(): plan})
    return target.put_once(item, _Item.of(encoded.payload, encoded.structure).content, encoded.report[0])


def _write_moments(rank: RankItems, first: WriteItem, second: WriteItem, target: _RankFile) -> list[StoredItem]:
    plan = replace(rank.orders.plans[first.index.fqn], exp_avg_sq=("exp_avg_sq",))
    plans: Plan = {("exp_avg_sq",): rank.orders.plans[second.index.fqn], ("exp_avg",): plan}
    square, mean = rank.tensor(second), rank.tensor(first)
    if square.untyped_storage().data_ptr() == mean.untyped_storage().data_ptr():
        mean = mean.clone()  # views of one memory would be one storage of the file
    encoded = encode_file({"exp_avg_sq": square, "exp_avg": mean}, plans)
    mean, square, offset = _split_moments(encoded)
    of_square, of_mean = encoded.report
    if offset is None:
        return [target.put_once(second, square.content, of_square), target.put_once(first, mean.content, of_mean)]
    outer = target.put_once(first, mean.content, of_mean)
    place = target.place(outer.storage_data.start + offset, square.content)
    return [outer, stored_item(second, place, of_square)]


@dataclass
class _RankFile:
    """A file of one rank that is being written; a `joiner` makes it an anchor. `small` has places of small items."""

    name: str
    file: DigestedFile
    joiner: _Joiner | None
    small: dict[bytes, Place] = field(default_factory=dict)

    def put(self, item: WriteItem, encoded: EncodedFile, measured_rms: float | None) -> StoredItem:
        """Write a weight."""
        zipped = _Item.of(encoded.payload, encoded.structure)
        start = self.joiner.add(name_of(item), zipped) if self.joiner else self._append(zipped.content)
        stored = stored_item(item, self.place(start, zipped.content), encoded.report[0], encoded.anchor_sha256)
        return replace(stored, delta_rms=measured_rms)

    def put_once(self, item: WriteItem, data: bytes | memoryview, report: TensorReport) -> StoredItem:
        """Write an item that is no weight; a small one is written only once if its bytes repeat."""
        key = bytes(data) if len(data) <= _REPEATED_BYTES else None
        if key in self.small:
            return stored_item(item, self.small[key], replace(report, bytes_in=0, bytes_out=0))
        stored = stored_item(item, self.place(self._append(data), data), report)
        if key is not None:
            self.small[key] = stored.storage_data
        return stored

    def place(self, start: int, data: bytes | memoryview) -> Place:
        """Return the place of bytes that begin at `start` of the file."""
        return Place(self.name, start, start + len(data), zlib_ng.crc32(data))

    def stored(self, items: Collection[StoredItem], anchors: Collection[Anchor] = ()) -> list[StoredItem]:
        """Add to each item the file, which is complete now, and the digests of all anchors that reading it takes."""
        first = min((anchor.sha256 for anchor in anchors), default=None)
        report = {"anchor": first, "tensors": [item.row for item in items]}
        entry = FileEntry(self.file.size_bytes, self.file.sha256(), report)
        digests = sorted({file.stem for anchor in anchors for file in anchor.files})
        stored = StoredFile(self.name, entry, is_anchor=self.joiner is not None, anchors=tuple(digests))
        return [replace(item, file=stored) for item in items]

    def _append(self, data: bytes | memoryview) -> int:
        start = self.file.size_bytes
        self.file.write(data)
        return start


@contextlib.contextmanager
def _new_file(path: Path, *, is_anchor: bool = False) -> Iterator[_RankFile]:
    with replace_file(path, path.parent.glob(f"*{ITEM_SUFFIX}")) as file:
        digested = DigestedFile(file)
        joiner = _Joiner(digested) if is_anchor else None
        yield _RankFile(path.name, digested, joiner)
        if joiner:
            joiner.finish()


@dataclass(frozen=True)
class _Item:
    """An encoded file of one tensor as 1-D uint8 `data`, with its structure and the start of its payload."""

    data: Tensor
    payload_start: int
    structure: dict[str, Any]

    @classmethod
    def of(cls, payload: Tensor, structure: str) -> _Item:
        """Put an encoded file into a zip file with only the records that torch.load needs, which saves 1 kB."""
        records = {"data.pkl": pickled(len(payload), structure), "data/0": payload.numpy().data, "version": b"3\n"}
        memory, starts = np.empty(sum(map(len, records.values())) + _MOST_HEADER_BYTES, np.uint8), {}
        file = MemoryFile(memory)
        with zipfile.ZipFile(file, "w") as target:
            for name, content in records.items():
                record = zipfile.ZipInfo(f"a/{name}")  # dated 1980, so that equal tensors give equal bytes
                record.create_system, record.file_size = _UNIX, len(content)
                with target.open(record, "w") as member:
                    starts[name] = file.tell()
                    member.write(content)
        data = torch.from_numpy(memory[: file.tell()])
        return cls(data, starts["data/0"], open_structure(structure))

    @property
    def lead(self) -> int:
        """The zeros to put before the item in another payload, so that its own payload is aligned there."""
        return -self.payload_start % ALIGNMENT_BYTES

    @property
    def content(self) -> memoryview:
        """The zip file."""
        return self.data.numpy().data


class _Joiner:
    """Writes items as one encoded file with a flat state dict into a new binary file."""

    def __init__(self, file: Writable):
        self._payload = Payload(file)
        self._storages: list[dict[str, Any]] = []
        self._tensors: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._anchor: dict[str, Any] = {}

    def add(self, name: str, item: _Item) -> int:
        """Append an item of one tensor under its key in the state dict, and return its first byte in the file."""
        nested, storages = _nest(item)
        self._payload.append(nested)
        (view,) = item.structure["tensors"]
        self._anchor |= {key: value for key, value in item.structure.items() if key == "anchor"}
        self._names.append(name)
        self._tensors.append({**view, "storage": view["storage"] + len(self._storages) + 1})
        self._storages += storages
        return FIRST_RECORD_START + self._payload.size_bytes - len(item.data)

    def finish(self) -> None:
        """Complete the file."""
        tree = {"dict": [[name, {"tensor": number}] for number, name in enumerate(self._names)]}
        content = {"tree": tree, "tensors": self._tensors, "storages": self._storages}
        structure = {"version": VERSION, **self._anchor, **content}
        self._payload.complete(seal_structure(structure))


def _split_moments(moments: EncodedFile) -> tuple[_Item, _Item, int | None]:
    """Split an encoded file of exp_avg and exp_avg_sq, and return an item of each.

    The third value is the offset of the item of exp_avg_sq in the item of exp_avg. It is None if exp_avg is decoded
    without exp_avg_sq, so that the items are apart.
    """
    structure = open_structure(moments.structure)
    square, mean = structure["storages"]
    pieces = cut_payload(structure, moments.payload)
    inner = _item([square], pieces[0])
    if "exp_avg_sq" not in mean:
        return _item([mean], pieces[1]), inner, None
    nested, storages = _nest(inner)
    outer = _item([*storages, {**mean, "exp_avg_sq": 1}], [nested, *pieces[1]])
    return outer, inner, outer.payload_start + inner.lead


def _item(storages: list[dict[str, Any]], pieces: Iterable[Tensor]) -> _Item:
    """Make an item whose tensor is the last storage."""
    payload = Payload()
    for piece in pieces:
        payload.append(piece)
    view = {"storage": len(storages) - 1}
    content = {"version": VERSION, "tree": {"tensor": 0}, "tensors": [view], "storages": storages}
    return _Item.of(payload.finish(), seal_structure(content))


def _nest(item: _Item) -> tuple[Tensor, list[dict[str, Any]]]:
    """Return an item's bytes for another payload, and the storages in these bytes, including its head and tail."""
    nested = torch.from_numpy(np.zeros(item.lead + len(item.data), np.uint8))
    nested[item.lead :] = item.data
    start = stop = item.lead + item.payload_start
    for entry in item.structure["storages"]:
        for size in entry["sizes"]:
            stop += -stop % ALIGNMENT_BYTES + size
    head, tail = nested[:start], nested[stop + -stop % ALIGNMENT_BYTES :]
    return nested, [_bytes_entry(head), *item.structure["storages"], _bytes_entry(tail)]


def _bytes_entry(data: Tensor) -> dict[str, Any]:
    length = len(data)
    return {"codec": "raw", "dtype": "uint8", "shape": [length], "sizes": [length], "crc32": payload_crc32([data])}
