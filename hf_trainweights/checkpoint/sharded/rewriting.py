"""Sharded checkpoints that are made small, or plain again, where they lie: a DCP directory, or a Trainer's checkpoint.

In a Trainer's checkpoint the DCP directories are rewritten one after the other, and a manifest of the whole checkpoint
goes first and comes back last, as for a checkpoint in files.

In a directory items are read from the old files and encoded into new ones, by each rank those of the files that it
wrote itself. New files have names that no old one has. When all of them are on the disk, the coordinator replaces the
manifest and then `.metadata`, in one step each, and removes the old files. So whenever a rank dies, `.metadata` lists
whole files: all old, or all new.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from hf_trainweights.checkpoint.dcp.metadata import ITEM_SUFFIX, Place
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
from hf_trainweights.checkpoint.run.anchors import unused_anchors
from hf_trainweights.checkpoint.run.checkpoints import checkpoint_directories, size_bytes
from hf_trainweights.checkpoint.run.job import SaveJob, manifest_fields, rewriting, write_complete_manifest
from hf_trainweights.checkpoint.sharded.conversion import verified_manifest, write_plain_in_place
from hf_trainweights.checkpoint.sharded.rank_items import RankItems
from hf_trainweights.checkpoint.sharded.writer import TrainWeightsWriter, write_items
from hf_trainweights.errors import CorruptFileError, UnsupportedError
from hf_trainweights.files.atomic import keeping_permissions, save_errors
from hf_trainweights.files.disk import is_old, lock_directory
from hf_trainweights.files.staging import remove_abandoned

_WRITTEN_BY = re.compile(r"__(\d+)_")


class ShardedLayout:
    """A checkpoint that ranks wrote together: a DCP directory, or a Trainer's checkpoint with some as its parts."""

    def __init__(self, path: Path, parts: Sequence[Path]):
        self.path = path
        self.directories = [*dict.fromkeys([path, *parts])]
        self._parts = parts

    def missing_problem(self) -> str | None:
        """Return None: there are weights, or an optimizer's state."""
        return None

    def problem(self) -> str | None:
        """Say why the directories cannot be loaded, as far as `require_complete` tells, or return None."""
        for part in self._parts:
            try:
                ShardedContents(part).require_complete()
            except (CorruptFileError, OSError) as error:
                return f"{part.name}: {error}"
        return None

    def unlisted(self, directory: Path) -> list[Path]:
        """List what an interrupted save or rewriting has left in one of the directories, sorted.

        Nothing where no whole checkpoint is there, since what is missing may be put back. Ranks on several machines
        hold no lock, so what is younger than a day may be of a save that still runs.
        """
        if directory not in self._parts:
            return unused_anchors(directory)
        try:
            contents = ShardedContents(directory)
            contents.require_complete()
        except (CorruptFileError, OSError):
            return []
        listed = {*contents.files}
        unlisted = [file for file in directory.glob(f"__*{ITEM_SUFFIX}") if file.name not in listed]
        if contents.manifest is not None:  # without it only the items themselves know their anchors
            anchors = directory.glob(f"*{ANCHOR_SUFFIX}")
            unlisted += [anchor for anchor in anchors if anchor.name not in contents.manifest.files]
        return sorted(filter(is_old, unlisted))

    def rewriting_bytes(self) -> int:
        """Return the free space that rewriting takes: old files of a directory stay until all new ones are there."""
        return max(map(size_bytes, self._parts))

    def compress(self, job: SaveJob) -> Manifest:
        """Make the files small; what was rounded before stays as it is. Of several ranks the coordinator calls this.

        Each rank encodes the files that it wrote.
        """
        if job.base is not None or job.keep_weights:
            option = "keep_weights" if job.keep_weights else "anchor"
            expected, next_step = f"a checkpoint in whole files with `{option}`", f"Leave `{option}` out."
            raise UnsupportedError(str(self.path), expected, "a sharded one", next_step)
        recorded = {"policy": job.policy.to_dict(), "keep_weights": False}
        previous = verified_manifest(self.path, self._parts)
        if previous is not None and job.is_done(previous, recorded):
            return previous
        with self._held():
            contents = [ShardedContents(part) for part in self._parts]
            for each in contents:
                each.require_complete()
            fields = manifest_fields(self.path, previous, job.metrics, recorded)
            self._encode(job, contents, fields.get("step"), recorded, job.class_after(previous))
            return self._finish(previous, fields)

    def restore(self) -> Manifest:
        """Turn the files into plain DCP files; after an error each is small or plain."""
        previous = verified_manifest(self.path, self._parts)
        if previous is not None and previous.mode == PLAIN_MODE:
            return previous
        with self._held():
            lost: dict[str, dict[str, float]] = {}
            for part in self._parts:
                contents = ShardedContents(part)
                own = total_rounding(replace(contents.manifest, rounded_before={})) if contents.manifest else {}
                rounding = add_rounding(self._lost_before(part, previous), own)
                for name in write_plain_in_place(contents):
                    if rounding:
                        lost[(part / name).relative_to(self.path).as_posix()] = rounding
            fields = manifest_fields(self.path, previous)
            return write_complete_manifest(self.path, None, Manifest({}, PLAIN_MODE, rounded_before=lost, **fields))

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.path not in self._parts:
                stack.enter_context(rewriting(self.path))
            stack.enter_context(save_errors(self.path, "Every file there is whole, old or new."))
            for part in self._parts:
                stack.enter_context(lock_directory(part, wait=True))
                remove_abandoned(part)
                stack.enter_context(keeping_permissions(part / MANIFEST_NAME))
            yield

    def _encode(
        self,
        job: SaveJob,
        contents: Sequence[ShardedContents],
        step: int | None,
        metadata: Mapping[str, Any],
        optimizer_class: str | None,
    ) -> None:
        """Encode the directories that are not rounded yet; another time would hide their error."""
        weights = [name for each in contents for name in each.all_weights()]
        trained = [state.parameter for each in contents for state in each.states.values()]
        job.policy.require_used([*weights, *trained])
        buffers = job.buffers
        if buffers is None and set(trained) & set(weights):
            buffers = sorted(set(weights) - set(trained))
        options: dict[str, Any] = {"buffers": buffers, "anchor_every": job.anchor_every}
        options |= {"step": step, "metadata": metadata, "optimizer": optimizer_class}
        for each in contents:
            if each.manifest is None or not total_rounding(each.manifest):
                anchor = self._anchor(each.directory)
                writer = TrainWeightsWriter(each.directory, job.policy.mode, job.policy.rules, anchor=anchor, **options)
                results = job.ranks.share(_shares(writer, each, job.ranks.size, [*weights, *trained]))
                writer.finish(replace(each.metadata), results)

    def _anchor(self, part: Path) -> Path | None:
        """Return the newest directory of the same kind that has anchors, in another checkpoint of the run."""
        for other in checkpoint_directories(self.path.parent):
            candidate = other / part.relative_to(self.path)
            with contextlib.suppress(CorruptFileError, OSError):
                anchor = None if other == self.path else read_manifest(candidate).sharded.get("anchor")
                if anchor and anchor.get("files"):
                    return candidate
        return None

    def _finish(self, previous: Manifest | None, fields: Mapping[str, Any]) -> Manifest:
        """Write the manifest of the whole checkpoint, and into those of its directories what they had lost before."""
        modes: list[str] = []
        entries: dict[str, FileEntry] = {}
        lost: dict[str, Mapping[str, float]] = {}
        for part in self._parts:
            manifest = read_manifest(part)
            states = {key: value for key, value in manifest.metadata.items() if key == STATES_KEY}
            fields = {**fields, "metadata": {**fields["metadata"], **states}}
            known = dict(fields) if part == self.path else {}
            if before := self._lost_before(part, previous):
                items = [name for name, entry in manifest.files.items() if entry.report.get("tensors")]
                known["rounded_before"] = dict.fromkeys(items, before)
            if known:
                manifest = replace(manifest, **known)
                write_manifest(part, manifest)
            if part == self.path:
                return manifest
            modes.append(manifest.mode)
            prefix = part.relative_to(self.path).as_posix()
            entries |= {f"{prefix}/{name}": entry for name, entry in manifest.files.items()}
            lost |= {f"{prefix}/{name}": value for name, value in manifest.rounded_before.items()}
        complete = Manifest(entries, lossiest(modes), rounded_before=lost, **fields)
        return write_complete_manifest(self.path, None, complete)

    def _lost_before(self, part: Path, previous: Manifest | None) -> dict[str, float]:
        """Return what values in a directory had lost before they were last encoded, the largest of all its files."""
        prefix = "" if part == self.path else f"{part.relative_to(self.path).as_posix()}/"
        largest: dict[str, float] = {}
        for name, lost in (previous.rounded_before if previous else {}).items():
            for role, error in lost.items() if name.startswith(prefix) else ():
                largest[role] = max(error, largest.get(role, 0.0))
        return largest


def _shares(
    writer: TrainWeightsWriter, contents: ShardedContents, size: int, names: Collection[str]
) -> list[Callable[[], list[WriteResult]]]:
    """Return what each rank does: it reads items from their places in the old files and writes them into new ones.

    `names` are those of the whole checkpoint: a rule for weights names nothing where only an optimizer lies.
    """
    items: list[list[WriteItem]] = [[] for _ in range(size)]
    owners: dict[str, int] = {}
    for number, name in enumerate(contents.files):
        match = _WRITTEN_BY.match(name)
        owners[name] = (int(match[1]) if match else number) % size
    for name, entry in contents.metadata.state_dict_metadata.items():
        for item in _items(name, entry):
            items[owners[contents.places[item.index].file]].append(item)
    keys = contents.metadata.planner_data
    plans = writer.prepare_global_plan([SavePlan(each, planner_data=keys) for each in items], names)
    places = [{item.index: contents.places[item.index] for item in plan.items} for plan in plans]
    return [partial(_write_share, contents.directory, *each) for each in zip(plans, places, strict=True)]


def _write_share(directory: Path, plan: SavePlan, places: Mapping[MetadataIndex, Place]) -> list[WriteResult]:
    def read(item: WriteItem) -> Any:
        place = places[item.index]
        if item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(read_place(directory, place))
        return read_tensor_at(directory, place, item.index.fqn)

    return write_items(RankItems(directory, plan.items, read, plan.storage_data, at_hand=plan.items))


def _items(name: str, entry: TensorStorageMetadata | BytesStorageMetadata) -> list[WriteItem]:
    if not isinstance(entry, TensorStorageMetadata):
        return [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)]
    parts = [TensorWriteData(chunk, entry.properties, entry.size) for chunk in entry.chunks]
    return [WriteItem(MetadataIndex(name, each.chunk.offsets), WriteItemType.SHARD, tensor_data=each) for each in parts]
