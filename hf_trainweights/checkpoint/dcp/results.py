"""What a rank reports of the items that it has written; DCP brings it to the coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from hf_trainweights.checkpoint.dcp.shards import shard_of
from hf_trainweights.checkpoint.encoded.encoder import TensorReport

# What stands as the codec of an object, which is kept as torch.save wrote it.
OBJECT_CODEC = "torch.save"


@dataclass(frozen=True)
class StoredFile:
    """A file of the checkpoint that one rank has written, and digests of the `anchors` that it refers to."""

    name: str
    size_bytes: int
    sha256: str
    is_anchor: bool = False
    anchors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """Where an item lies: a file of the checkpoint, the first byte in it and the one after the last.

    `crc32` is over these bytes; None in a plain checkpoint, because PyTorch keeps none.
    """

    file: str
    start: int
    stop: int
    crc32: int | None = None


@dataclass(frozen=True)
class StoredItem(WriteResult):
    """An item that one rank has written; `storage_data` is its `Place`.

    The manifest has its `row` (see description.py). `delta_rms` is how far the shard has moved from its anchor, where
    this save measured it. One that `is_repeated` has the bytes of another item and takes no space of its own.
    """

    row: Mapping[str, Any] = field(default_factory=dict, compare=False)
    file: StoredFile = field(default=StoredFile("", 0, ""), compare=False)
    delta_rms: float | None = field(default=None, compare=False)
    is_repeated: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Written:
    """An item whose file is not complete yet; `report` is None for an object, and the rest as in `StoredItem`."""

    item: WriteItem
    start: int
    size_bytes: int
    crc32: int
    report: TensorReport | None = None
    anchor_sha256: str | None = None
    delta_rms: float | None = None
    is_repeated: bool = False

    def stored(self, file: StoredFile) -> StoredItem:
        """Return the result for DCP, once the file is complete."""
        place = Place(file.name, self.start, self.start + self.size_bytes, self.crc32)
        row = self._row(place)
        return StoredItem(self.item.index, self.size_bytes, place, row, file, self.delta_rms, self.is_repeated)

    def _row(self, place: Place) -> dict[str, Any]:
        fqn, report = self.item.index.fqn, self.report
        row: dict[str, Any] = {
            "path": fqn,
            "name": report.name if report else fqn,
            "role": report.role if report else "other",
            "codec": report.codec if report else OBJECT_CODEC,
            "params": report.params if report else {},
            "bound": report.bound if report else None,
            "bytes_in": 0 if self.is_repeated else report.bytes_in if report else self.size_bytes,
            "bytes_out": 0 if self.is_repeated else report.bytes_out if report else self.size_bytes,
            "bytes": f"{place.start}:{place.stop}",
            "crc32": place.crc32,
        }
        shard = shard_of(self.item)
        if shard is not None:
            row["shard"] = shard
        if self.anchor_sha256 is not None:
            row["anchor"] = self.anchor_sha256
        return row
