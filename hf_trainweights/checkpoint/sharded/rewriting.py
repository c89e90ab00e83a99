"""A DCP directory that is rewritten where it lies: its items are read from the old files and encoded into new ones.

Each rank encodes the files that it wrote itself. New files have names that no old one has. When all of them are on the
disk, the coordinator replaces the manifest and then `.metadata`, in one step each, and removes the old files. So
whenever a rank dies, `.metadata` lists whole files: all old, or all new.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from hf_trainweights.checkpoint.dcp.contents import ShardedContents, read_place
from hf_trainweights.checkpoint.dcp.parts import all_weights, optimizer_tensors
from hf_trainweights.checkpoint.dcp.reader import load_item
from hf_trainweights.checkpoint.dcp.results import Place
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.run.ranks import Ranks
from hf_trainweights.checkpoint.sharded.rank_items import RankItems
from hf_trainweights.checkpoint.sharded.writer import TrainWeightsWriter, write_items
from hf_trainweights.errors import ConfigError

_WRITTEN_BY = re.compile(r"__(\d+)_")


@dataclass(frozen=True)
class Rewriting:
    """How a DCP directory is to be encoded.

    Args:
        directory: The directory.
        policy: Which codec for which tensor.
        anchor: An earlier checkpoint's directory of the same kind.
        buffers: Names in the model that are buffers; None if the directory itself tells.
        anchor_every: The most checkpoints that one anchor serves.
        step: Training steps done.
        metadata: JSON for its manifest.
    """

    directory: Path
    policy: Policy
    anchor: Path | None
    buffers: Collection[str] | None
    anchor_every: int
    step: int | None
    metadata: Mapping[str, Any]

    def run(self, ranks: Ranks) -> None:
        """Encode the directory, whose files are whole after any error; the coordinator of several ranks calls it."""
        contents = ShardedContents(self.directory)
        contents.require_complete()
        writer = self._writer(contents)
        results = ranks.share(_shares(writer, contents, ranks.size))
        writer.finish(replace(contents.metadata), results)

    def _writer(self, contents: ShardedContents) -> TrainWeightsWriter:
        names = [*all_weights(contents), *(name.split(".", 1)[1] for name in optimizer_tensors(contents))]
        return TrainWeightsWriter(
            self.directory,
            self.policy.mode,
            used_rules(self.policy, [*names, *(name.rpartition(".")[0] for name in names)]),
            anchor=self.anchor,
            buffers=self.buffers,
            anchor_every=self.anchor_every,
            step=self.step,
            metadata=self.metadata,
        )


def used_rules(policy: Policy, names: Sequence[str]) -> dict[str, Any]:
    """Return the rules that name something: a rule for weights names nothing where only an optimizer lies."""
    used = {}
    for selector, choice in policy.rules.items():
        try:
            Policy(policy.mode, {selector: choice}).require_used(names)
        except ConfigError:
            continue
        used[selector] = choice
    return used


@dataclass(frozen=True)
class _Share:
    """What one rank does: it reads items from the old files and writes them into new ones.

    Args:
        directory: The directory.
        plan: What it writes.
        places: Where it finds that.
    """

    directory: Path
    plan: SavePlan
    places: Mapping[MetadataIndex, Place]

    def __call__(self) -> list[WriteResult]:
        items = self.plan.items
        return write_items(RankItems(self.directory, items, self._read, self.plan.storage_data, at_hand=items))

    def _read(self, item: WriteItem) -> Any:
        place = self.places[item.index]
        data = read_place(self.directory, place)
        if item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(data)
        return load_item(data, f"{self.directory / place.file}, {item.index.fqn}")


def _shares(writer: TrainWeightsWriter, contents: ShardedContents, size: int) -> list[_Share]:
    items: list[list[WriteItem]] = [[] for _ in range(size)]
    names = sorted({place.file for place in contents.places.values()})
    owners = {name: _owner(name, number) % size for number, name in enumerate(names)}
    for name, entry in contents.metadata.state_dict_metadata.items():
        for item in _items(name, entry):
            items[owners[contents.places[item.index].file]].append(item)
    keys = contents.metadata.planner_data
    plans = writer.prepare_global_plan([SavePlan(each, planner_data=keys) for each in items])
    places = [{item.index: contents.places[item.index] for item in plan.items} for plan in plans]
    return [_Share(contents.directory, *each) for each in zip(plans, places, strict=True)]


def _owner(name: str, number: int) -> int:
    match = _WRITTEN_BY.match(name)
    return int(match[1]) if match else number


def _items(name: str, entry: TensorStorageMetadata | BytesStorageMetadata) -> list[WriteItem]:
    if not isinstance(entry, TensorStorageMetadata):
        return [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)]
    return [_item(name, entry, chunk) for chunk in entry.chunks]


def _item(name: str, entry: TensorStorageMetadata, chunk: ChunkStorageMetadata) -> WriteItem:
    data = TensorWriteData(chunk, entry.properties, entry.size)
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
