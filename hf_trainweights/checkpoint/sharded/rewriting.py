"""Compress sharded checkpoints in place and restore them: a DCP directory, or a Trainer's checkpoint that has several.

In a Trainer's checkpoint the DCP directories are rewritten one after the other. The manifest of the complete checkpoint
is removed first and written last, as for a checkpoint in whole files.

In a DCP directory each rank reads the items of the files that it wrote, and encodes them into new files with new names.
When all new files are on the disk, the coordinator replaces the manifest and then `.metadata`, in one step each, and
removes the old files. So whenever a rank dies, `.metadata` lists intact files: all old, or all new.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from hf_trainweights.checkpoint.dcp.metadata import ITEM_SUFFIX, METADATA_NAME, Place
from hf_trainweights.checkpoint.dcp.reader import ShardedContents, read_place, read_tensor_at
from hf_trainweights.checkpoint.encoded.structure import ANCHOR_SUFFIX
from hf_trainweights.checkpoint.manifest import (
    MANIFEST_NAME,
    PLAIN_MODE,
    FileEntry,
    Manifest,
    add_rounding,
    lossiest,
    read_manifest,
    total_rounding,
    write_manifest,
)
from hf_trainweights.checkpoint.planning.optimizers import STATES_KEY
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.planning.roles import optimizer_states
from hf_trainweights.checkpoint.run.anchors import unused_anchors
from hf_trainweights.checkpoint.run.checkpoints import checkpoint_directories, list_files, size_bytes
from hf_trainweights.checkpoint.run.in_place import Listing, rewriting
from hf_trainweights.checkpoint.run.job import RewriteJob
from hf_trainweights.checkpoint.run.ranks import Ranks
from hf_trainweights.checkpoint.sharded.conversion import verified_manifest, write_plain_in_place
from hf_trainweights.checkpoint.sharded.rank_items import RankItems, RankOrders, is_weight
from hf_trainweights.checkpoint.sharded.writer import TrainWeightsWriter, plan_tensors, write_items
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.atomic import keeping_permissions, save_errors
from hf_trainweights.files.disk import is_old, lock_directory
from hf_trainweights.files.staging import remove_abandoned

_WRITTEN_BY = re.compile(r"__(\d+)_")


class ShardedLayout:
    """A checkpoint that ranks wrote together: a DCP directory, or a Trainer's checkpoint that has DCP directories."""

    def __init__(self, path: Path, dcp_directories: Sequence[Path]):
        self.path = path
        self.directories = [*dict.fromkeys([path, *dcp_directories])]
        self._dcp_directories = dcp_directories

    def missing_problem(self) -> str | None:
        """Return None, because a DCP directory always has weights or an optimizer's state."""
        return None

    def problem(self) -> str | None:
        """Return the problem that `require_complete` sees in one of the DCP directories, or None."""
        for directory in self._dcp_directories:
            try:
                ShardedContents(directory).require_complete()
            except (CorruptFileError, OSError) as error:
                return f"{directory.name}: {error}"
        return None

    def unlisted(self, directory: Path) -> list[Path]:
        """List the files that an interrupted save or rewriting has left in one of the directories, sorted.

        The list is empty if the checkpoint is not complete, because its missing files may be put back. Ranks on several
        machines hold no lock, so a file younger than a day may belong to a save that still runs.
        """
        if directory not in self._dcp_directories:
            return unused_anchors(directory)
        try:
            contents = ShardedContents(directory)
            contents.require_complete()
        except (CorruptFileError, OSError):
            return []
        listed_names = {*contents.files}
        unlisted = [file for file in directory.glob(f"__*{ITEM_SUFFIX}") if file.name not in listed_names]
        if contents.manifest is not None:  # if there is no manifest, only the items themselves name their anchors
            anchors = directory.glob(f"*{ANCHOR_SUFFIX}")
            unlisted += [anchor for anchor in anchors if anchor.name not in contents.manifest.files]
        return sorted(filter(is_old, unlisted))

    def rewriting_bytes(self) -> int:
        """Return the free bytes that rewriting takes: old files of a directory stay until all new ones are there."""
        return max(map(size_bytes, self._dcp_directories))

    def compress(self, job: RewriteJob) -> Manifest:
        """Compress the files; directories that were rounded before stay as they are.

        The coordinator calls this within `Ranks.decide`, and each rank encodes the files that it wrote.
        """
        job.require_own_weights("a sharded one")
        recorded = {"policy": job.policy.to_dict(), "keep_weights": False}
        previous = verified_manifest(self.path, self._dcp_directories)
        if previous is not None and job.is_done(previous, recorded):
            return previous
        listing = self._listing(previous)
        with self._locked():
            contents = self._whole_contents(job.ranks, is_verified=previous is not None)
            fields = listing.manifest_fields(job.metrics, recorded)
            self._encode(job, contents, fields.get("step"), recorded, job.class_after(previous))
            return self._finish(listing, fields)

    def restore(self) -> Manifest:
        """Replace the files by plain DCP files; after an error each directory is either encoded or plain."""
        previous = verified_manifest(self.path, self._dcp_directories)
        if previous is not None and previous.mode == PLAIN_MODE:
            return previous
        listing = self._listing(previous)
        with self._locked():
            roundings: dict[str, dict[str, float]] = {}
            for contents in self._whole_contents(Ranks(), is_verified=previous is not None):
                directory = contents.directory
                own = total_rounding(replace(contents.manifest, rounded_before={})) if contents.manifest else {}
                rounding = add_rounding(self._rounded_before(directory, previous), own)
                for name in write_plain_in_place(contents):
                    if rounding:
                        roundings[(directory / name).relative_to(self.path).as_posix()] = rounding
            manifest = Manifest({}, PLAIN_MODE, rounded_before=roundings, **listing.manifest_fields())
            return listing.write_manifest(manifest, carries_rounding=False)

    def _whole_contents(self, ranks: Ranks, *, is_verified: bool) -> list[ShardedContents]:
        """Open all directories; each rank reads the items that it wrote, unless a manifest `is_verified`.

        CorruptFileError: an item is damaged or missing.
        """
        contents = [ShardedContents(directory) for directory in self._dcp_directories]
        for content in contents:
            content.require_complete()
            if not is_verified:
                owners = _owners(content, ranks.size)
                places: list[list[Place]] = [[] for _ in range(ranks.size)]
                for place in content.places.values():
                    places[owners[place.file]].append(place)
                ranks.share([partial(_read_items, content.directory, own) for own in places])
        return contents

    def _listing(self, previous: Manifest | None) -> Listing:
        """List the files that torch.distributed.checkpoint has not written; ranks check those that it has."""
        items = [name for name in list_files(self.path) if name.endswith((ITEM_SUFFIX, METADATA_NAME, ANCHOR_SUFFIX))]
        return Listing.read(self.path, previous, items)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.path not in self._dcp_directories:
                stack.enter_context(rewriting(self.path))
            stack.enter_context(save_errors(self.path, "Every file there is whole, old or new."))
            for directory in self._dcp_directories:
                stack.enter_context(lock_directory(directory, wait=True))
                remove_abandoned(directory)
                stack.enter_context(keeping_permissions(directory / MANIFEST_NAME))
            yield

    def _encode(
        self,
        job: RewriteJob,
        contents: Sequence[ShardedContents],
        step: int | None,
        metadata: Mapping[str, Any],
        optimizer_class: str | None,
    ) -> None:
        """Encode the directories that are not rounded yet; encoding a rounded one again would hide its error."""
        weights = [name for content in contents for name in content.all_weights()]
        trained = [state.parameter for content in contents for state in content.states.values()]
        job.policy.require_used([*weights, *trained])
        buffers = job.buffers
        if buffers is None and set(trained) & set(weights):
            buffers = sorted(set(weights) - set(trained))
        options: dict[str, Any] = {"buffers": buffers, "anchor_every": job.anchor_every}
        options |= {"step": step, "metadata": metadata, "optimizer": optimizer_class}
        # Weights come first, while the moments, which tell how far weights move, are still as the Trainer wrote them.
        for content in sorted(contents, key=lambda content: not content.all_weights()):
            if content.manifest is None or not total_rounding(content.manifest):
                path, anchor = content.directory, self._anchor(content.directory)
                writer = TrainWeightsWriter(path, job.policy.mode, job.policy.rules, anchor=anchor, **options)
                tasks = _rank_tasks(writer, content, job.ranks.size, [*weights, *trained])
                for other in contents:
                    if other is not content:
                        tasks = _with_states(tasks, other, optimizer_class)
                writer.finish(replace(content.metadata), job.ranks.share(tasks))

    def _anchor(self, directory: Path) -> Path | None:
        """Return the directory of the same name that has anchors, in the newest other checkpoint of the run."""
        for other in checkpoint_directories(self.path.parent):
            candidate = other / directory.relative_to(self.path)
            with contextlib.suppress(CorruptFileError, OSError):
                anchor = None if other == self.path else read_manifest(candidate).sharded.get("anchor")
                if anchor and anchor.get("files"):
                    return candidate
        return None

    def _finish(self, listing: Listing, fields: Mapping[str, Any]) -> Manifest:
        """Write the manifest of the complete checkpoint, and add earlier rounding to those of its directories."""
        modes: list[str] = []
        entries: dict[str, FileEntry] = {}
        roundings: dict[str, Mapping[str, float]] = {}
        for directory in self._dcp_directories:
            manifest = read_manifest(directory)
            states = {key: value for key, value in manifest.metadata.items() if key == STATES_KEY}
            fields = {**fields, "metadata": {**fields["metadata"], **states}}
            new_fields = dict(fields) if directory == self.path else {}
            if rounding := self._rounded_before(directory, listing.previous):
                items = [name for name, entry in manifest.files.items() if entry.report.get("tensors")]
                new_fields["rounded_before"] = dict.fromkeys(items, rounding)
            if new_fields:
                manifest = replace(manifest, **new_fields)
                write_manifest(directory, manifest)
            if directory == self.path:
                return manifest
            modes.append(manifest.mode)
            prefix = directory.relative_to(self.path).as_posix()
            entries |= {f"{prefix}/{name}": entry for name, entry in manifest.files.items()}
            roundings |= {f"{prefix}/{name}": value for name, value in manifest.rounded_before.items()}
        complete = Manifest(entries, lossiest(modes), rounded_before=roundings, **fields)
        return listing.write_manifest(complete, carries_rounding=False)

    def _rounded_before(self, directory: Path, previous: Manifest | None) -> dict[str, float]:
        """Return by role the largest rounding that files of a directory had before they were last encoded."""
        prefix = "" if directory == self.path else f"{directory.relative_to(self.path).as_posix()}/"
        largest: dict[str, float] = {}
        for name, rounding in (previous.rounded_before if previous else {}).items():
            for role, error in rounding.items() if name.startswith(prefix) else ():
                largest[role] = max(error, largest.get(role, 0.0))
        return largest


@dataclass(frozen=True)
class _RankTask:
    """The work of one rank: to read items from their places in the old files and write them into new files.

    `at_hand` are the items that are written, and states of their weights in other directories.
    """

    directory: Path
    plan: SavePlan
    at_hand: Sequence[WriteItem]
    places: Mapping[MetadataIndex, tuple[Path, Place]]

    def __call__(self) -> list[WriteResult]:
        return write_items(RankItems(self.directory, self.plan.items, self._read, self.plan.storage_data, self.at_hand))

    def _read(self, item: WriteItem) -> Any:
        directory, place = self.places[item.index]
        if item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(read_place(directory, place))
        return read_tensor_at(directory, place, item.index.fqn)


def _rank_tasks(
    writer: TrainWeightsWriter, contents: ShardedContents, size: int, names: Collection[str]
) -> list[_RankTask]:
    """Return the task of each rank.

    `names` are all names in the checkpoint: a rule for weights fits nothing in a directory of the optimizer alone.
    """
    items: list[list[WriteItem]] = [[] for _ in range(size)]
    owners = _owners(contents, size)
    for item in _items(contents):
        items[owners[contents.places[item.index].file]].append(item)
    keys = contents.metadata.planner_data
    plans = writer.prepare_global_plan([SavePlan(rank_items, planner_data=keys) for rank_items in items], names)
    return [_RankTask(contents.directory, plan, plan.items, _places(contents, plan.items)) for plan in plans]


def _owners(contents: ShardedContents, size: int) -> dict[str, int]:
    """Return for each file the rank that wrote it, or another one if there are fewer ranks now."""
    matches = [_WRITTEN_BY.match(name) for name in contents.files]
    ranks = (int(match[1]) if match else number for number, match in enumerate(matches))
    return {name: rank % size for name, rank in zip(contents.files, ranks, strict=True)}


def _read_items(directory: Path, places: Sequence[Place]) -> None:
    """Read items, and check their checksums; CorruptFileError: one is damaged."""
    for place in places:
        read_place(directory, place)


def _with_states(tasks: Sequence[_RankTask], other: ShardedContents, optimizer_class: str | None) -> list[_RankTask]:
    """Give each rank the states of its weights at hand that lie in another directory, as a Trainer writes them."""
    states = optimizer_states(other.metadata.state_dict_metadata)
    items = [item for item in _items(other) if item.index.fqn in states]
    saved = SavePlan(items, planner_data=other.metadata.planner_data)
    plans = plan_tensors([saved], Policy(), None, (), optimizer_class, is_delta=False)
    extended = []
    for task in tasks:
        orders: RankOrders = task.plan.storage_data
        weights = [item for item in task.plan.items if is_weight(orders.plans.get(item.index.fqn))]
        shards = {(orders.plans[item.index.fqn].name, item.index.offset) for item in weights}
        names = {name for name, _ in shards}

        def is_needed(item: WriteItem, names: Collection[str] = names, shards: Collection[Any] = shards) -> bool:
            parameter, offset = states[item.index.fqn].parameter, item.index.offset
            return (parameter, offset) in shards if offset else parameter in names or item.index.fqn not in plans

        at_hand = [item for item in items if is_needed(item)]
        of_rank = {item.index.fqn: plans[item.index.fqn] for item in at_hand if item.index.fqn in plans}
        plan = replace(task.plan, storage_data=replace(orders, plans={**of_rank, **orders.plans}))
        places = {**task.places, **_places(other, at_hand)}
        extended.append(replace(task, plan=plan, at_hand=[*task.at_hand, *at_hand], places=places))
    return extended


def _places(contents: ShardedContents, items: Iterable[WriteItem]) -> dict[MetadataIndex, tuple[Path, Place]]:
    return {item.index: (contents.directory, contents.places[item.index]) for item in items}


def _items(contents: ShardedContents) -> list[WriteItem]:
    """Return an item for each shard of each tensor and for each object."""
    items = []
    for name, entry in contents.metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
            continue
        shards = [TensorWriteData(chunk, entry.properties, entry.size) for chunk in entry.chunks]
        items += [WriteItem(MetadataIndex(name, x.chunk.offsets), WriteItemType.SHARD, tensor_data=x) for x in shards]
    return items
