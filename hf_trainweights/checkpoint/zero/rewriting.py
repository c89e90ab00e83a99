"""Compress checkpoints of DeepSpeed's ZeRO in place and restore them: one tag, or a Trainer's checkpoint that has one.

Each rank rewrites the files that it wrote, one after the other, each in one step. Then the files that repeat weights
are rewritten, because they refer to the weights of all ranks. The manifest is removed first and written last. So at
every moment each file is whole, old or new, and DeepSpeed loads the checkpoint.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hf_trainweights.checkpoint.encoded.decoder import Anchor
from hf_trainweights.checkpoint.encoded.encoder import encode_file
from hf_trainweights.checkpoint.encoded.reader import is_encoded, read_structure
from hf_trainweights.checkpoint.encoded.structure import ANCHOR_SUFFIX, anchor_file_name
from hf_trainweights.checkpoint.manifest import (
    MANIFEST_NAME,
    PLAIN_MODE,
    FileEntry,
    Manifest,
    add_rounding,
    read_manifest,
    reported_rounding,
)
from hf_trainweights.checkpoint.planning.optimizers import STATES_KEY, states_entry
from hf_trainweights.checkpoint.planning.policy import LOSSY_MODES
from hf_trainweights.checkpoint.planning.update_rules import OPTIMIZER_ROLES
from hf_trainweights.checkpoint.run.anchors import AnchorRecord, unused_anchors
from hf_trainweights.checkpoint.run.checkpoints import entry_points, intact_manifest
from hf_trainweights.checkpoint.run.file_checks import anchor_problem, file_problem, weights_problem
from hf_trainweights.checkpoint.run.in_place import Listing, rewriting
from hf_trainweights.checkpoint.run.job import RewriteJob
from hf_trainweights.checkpoint.run.ranks import Ranks
from hf_trainweights.checkpoint.run.weight_files import read_weights, require_packages, restore_file, weight_files
from hf_trainweights.checkpoint.run.weights import WEIGHTS_NAME, WeightsAnchor, encoded_entry
from hf_trainweights.checkpoint.zero.files import TagFiles, tag_directories
from hf_trainweights.checkpoint.zero.model_files import ModelOrder, RepeatedWeights, repeat, rewrite_models
from hf_trainweights.checkpoint.zero.rank_files import RankOrder, Rewritten, require_whole_files, rewrite_states
from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.files.atomic import remove_files
from hf_trainweights.files.disk import lock_directory
from hf_trainweights.files.staging import remove_abandoned

# The key in the field `sharded` of a manifest: by file, the record of the anchor that has its weights.
_ANCHORS = "zero_anchors"


class ZeroLayout:
    """A checkpoint of DeepSpeed: the directory of a tag, or a Trainer's or accelerate's directory that has one."""

    def __init__(self, path: Path, tags: Sequence[Path]):
        self.path = path
        self.directories = [*dict.fromkeys([path, *tags])]
        self._tags = tags

    def missing_problem(self) -> str | None:
        """Return a sentence if a rank's file is missing, else None."""
        return next(filter(None, (TagFiles(tag).missing() for tag in self._tags)), None)

    def problem(self) -> str | None:
        """Return why a resume could not read the files of all ranks, as checksums and anchors show, or None."""
        files = [tag / name for tag in self._tags for name in TagFiles(tag).names]
        weights = entry_points(self.path)[:1]
        problems = (check(file) for check in (file_problem, anchor_problem) for file in files)
        of_weights = (check(file) for check in (weights_problem, anchor_problem) for file in weights)
        return self.missing_problem() or next(filter(None, problems), None) or next(filter(None, of_weights), None)

    def unlisted(self, directory: Path) -> list[Path]:
        """List the files that an interrupted save has left: anchors that are not needed."""
        return unused_anchors(directory)

    def rewriting_bytes(self) -> int:
        """Return the free bytes that rewriting takes: each rank writes new files beside the old ones."""
        return sum((tag / name).stat().st_size for tag in self._tags for name in TagFiles(tag).states)

    def compress(self, job: RewriteJob) -> Manifest:
        """Compress the files; those that were rounded before stay as they are.

        The coordinator calls this within `Ranks.decide`, and each rank encodes the files that it wrote.
        """
        job.require_own_weights("one of DeepSpeed")
        self._require_one_tag()
        recorded: dict[str, Any] = {"policy": job.policy.to_dict(), "keep_weights": False}
        previous = intact_manifest(self.path)
        if previous and job.is_done(previous, recorded):
            return previous
        listing = self._listing(previous)
        for tag in self._tags:
            names, size = TagFiles(tag).names, job.ranks.size
            job.ranks.share([partial(require_whole_files, tag, names[rank::size]) for rank in range(size)])
        with self._locked():
            fields = listing.manifest_fields(job.metrics, recorded)
            fields["step"] = fields.get("step") or TagFiles(self._tags[0]).step
            job = replace(job, optimizer_class=job.class_after(previous))
            entries, records, kept_names = self._encode(job, fields["step"])
            fields["metadata"] |= {STATES_KEY: _states(job, entries.values())}
            manifest = Manifest(entries, job.policy.mode, sharded={_ANCHORS: records}, **fields)
            return self._finish(listing, manifest, kept=kept_names)

    def restore(self) -> Manifest:
        """Replace the files by plain ones that DeepSpeed reads without this package; each is whole, encoded or plain.

        UnsupportedError: DeepSpeed is not installed, so its objects cannot be written.
        """
        previous = intact_manifest(self.path)
        listing = self._listing(previous)
        states = (tag / name for tag in self._tags for name in TagFiles(tag).states)
        require_packages(self.path, map(read_structure, filter(is_encoded, states)))
        roundings, entries = dict(previous.rounded_before) if previous else {}, {}
        with self._locked():
            files = [*weight_files(self.path), *(tag / name for tag in self._tags for name in TagFiles(tag).names)]
            for file in filter(is_encoded, files):
                name = file.relative_to(self.path).as_posix()
                entries[name], rounding = restore_file(file, read_structure(file))
                if previous and name in previous.files:  # it also reports the rounding of weights in the anchor
                    rounding = reported_rounding(previous.files[name].report)
                if rounding:
                    roundings[name] = add_rounding(roundings.get(name, {}), rounding)
            manifest = Manifest(entries, PLAIN_MODE, rounded_before=roundings, **listing.manifest_fields())
            return self._finish(listing, manifest, carries_rounding=False)

    def _require_one_tag(self) -> None:
        if len(self._tags) > 1:
            next_step = f"Pass one of them, e.g. {self._tags[-1]}."
            raise ConfigError(str(self.path), "one checkpoint", f"{len(self._tags)} of DeepSpeed", next_step)

    def _listing(self, previous: Manifest | None) -> Listing:
        """Check that all ranks' files are there, and list the undamaged files beside them; ranks check their own."""
        if problem := self.missing_problem():
            next_step = "Use another checkpoint, or restore the file from a copy."
            raise CorruptFileError(str(self.path), "the files of all ranks", problem, next_step)
        files = [tag / name for tag in self._tags for name in TagFiles(tag).names]
        files += [anchor for tag in self._tags for anchor in tag.glob(f"*{ANCHOR_SUFFIX}")]
        checked_later = {file.relative_to(self.path).as_posix() for file in files}
        return Listing.read(self.path, previous, checked_later)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(rewriting(self.path))
            for tag in self._tags:
                if tag != self.path:
                    stack.enter_context(lock_directory(tag, wait=True))
                    remove_abandoned(tag)
            yield

    def _encode(self, job: RewriteJob, step: int | None) -> tuple[dict[str, FileEntry], dict[str, Any], set[str]]:
        """Encode all files; return their entries and the records of anchors by name, and the names of kept files."""
        (tag,) = self._tags
        files, earlier = TagFiles(tag), _earlier(self.path, tag, step)
        tag_job = replace(job, path=tag, ranks=Ranks())
        interval = step - earlier[0].step if earlier and step and earlier[0].step else None
        interval = interval if interval is not None and interval > 0 else None
        candidates = {name: _candidate(earlier, name, interval) for name in files.names}
        shapes = {rank: files.outline(rank).get("param_shapes") or [] for rank in {r for _, r in files.states.values()}}
        job.policy.require_used(name for groups in shapes.values() for group in groups for name in group)
        world_sizes = {rank: 1 + max(r for r, other in files.states.values() if other == rank) for rank in shapes}
        orders = [
            RankOrder(name, rank, world_sizes[model_rank], shapes[model_rank], candidates[name])
            for name, (rank, model_rank) in files.states.items()
        ]
        shares = [orders[rank :: job.ranks.size] for rank in range(job.ranks.size)]
        tasks = [partial(rewrite_states, tag_job, share, interval) for share in shares]
        states = [result for results in job.ranks.share(tasks) for result in results]
        model_orders = []
        for name, (own_rank, model_rank) in files.models.items():
            ranks = [result for result in states if files.states[result.name][1] == model_rank and own_rank is None]
            anchors = [result.anchor for result in ranks if result.anchor is not None]
            model_orders.append(ModelOrder(name, anchors, _bounds(ranks), candidates[name]))
        tasks = [
            partial(rewrite_models, tag_job, model_orders[rank :: job.ranks.size]) for rank in range(job.ranks.size)
        ]
        models = [result for results in job.ranks.share(tasks) for result in results]
        for result in [*states, *models]:
            if result.problem:
                warnings.warn(f"{tag / result.name} stays as it is: {result.problem}", stacklevel=4)
        prefix = "" if tag == self.path else f"{tag.name}/"
        entries = {f"{prefix}{name}": entry for result in [*states, *models] for name, entry in result.entries.items()}
        records = {result.name: dict(result.record) for result in [*states, *models] if result.record}
        kept_names = {f"{prefix}{result.name}" for result in states if result.is_kept}
        return entries | self._encode_weights(job, [*states, *models]), records, kept_names

    def _encode_weights(self, job: RewriteJob, results: Sequence[Rewritten]) -> dict[str, FileEntry]:
        """Replace the model's own files, which a Trainer writes beside the tag, by one that refers to all anchors."""
        (tag,), old_files = self._tags, weight_files(self.path)
        anchors = [Anchor(tag / anchor_file_name(x.anchor), sha256=x.anchor) for x in results if x.anchor]
        if tag == self.path or not old_files or not anchors or old_files[0].name.startswith("adapter"):
            return {}
        if old_files[0].name == WEIGHTS_NAME and is_encoded(old_files[0]):
            return {}
        repeated = RepeatedWeights(anchors, _bounds(results))
        tree, plan, _ = repeat({"module": read_weights(old_files[0])}, repeated)
        plan = {path[1:]: planned for path, planned in plan.items()}
        with job.open_file(WEIGHTS_NAME) as target:
            options = {"anchor": repeated.anchors, "anchor_directory": tag}
            written = encode_file(tree["module"], plan, target, **options)
        remove_files(file for file in old_files if file.name != WEIGHTS_NAME)
        return {WEIGHTS_NAME: encoded_entry(target, written)}

    def _finish(self, listing: Listing, manifest: Manifest, **options: Any) -> Manifest:
        for tag in self._tags:
            if tag != self.path:
                remove_files(unused_anchors(tag))
        return listing.write_manifest(manifest, **options)


def _bounds(results: Sequence[Rewritten]) -> dict[str, float]:
    """Return the error of each piece of rounded weights, by the name of the piece."""
    entries = [result.entries.get(result.name) for result in results if result.anchor]
    rows = [row for entry in entries if entry for row in entry.report["tensors"] if row["role"] == "weight"]
    return {row["name"]: row["bound"] for row in rows if row["bound"] is not None}


def _states(job: RewriteJob, entries: Any) -> dict[str, Any]:
    """Return the manifest's metadata about the optimizer states in these files."""
    rows = [row for entry in entries for row in entry.report.get("tensors", ()) if row["role"] in OPTIMIZER_ROLES]
    return states_entry(job.optimizer_class, rows, is_lossy=job.policy.mode in LOSSY_MODES)


class _Earlier:
    """An earlier checkpoint of the run: the directory of its tag, its step, and the records of its anchors."""

    def __init__(self, path: Path, manifest: Manifest, tag: Path):
        self.tag, self.step = tag, manifest.step
        anchors = manifest.sharded.get(_ANCHORS)
        self.records: Mapping[str, Any] = anchors if isinstance(anchors, Mapping) else {}


def _earlier(path: Path, tag: Path, step: int | None) -> list[_Earlier]:
    """List the checkpoints beside one that have anchors, the newest first."""
    checkpoints = []
    for other in path.parent.iterdir():
        if other == path or not (other / MANIFEST_NAME).is_file():
            continue
        with contextlib.suppress(CorruptFileError, OSError):
            manifest = read_manifest(other)
            if manifest.sharded.get(_ANCHORS):
                tags = tag_directories(other)
                if tags:
                    checkpoints.append((manifest.step or 0, manifest.created, _Earlier(other, manifest, tags[0])))
    return [earlier for *_, earlier in sorted(checkpoints, key=lambda item: item[:2], reverse=True)]


def _candidate(earlier: Sequence[_Earlier], name: str, interval: int | None) -> WeightsAnchor | None:
    """Return the anchor of a file, as the newest earlier checkpoint records it; None if there is none."""
    for checkpoint in earlier:
        with contextlib.suppress(CorruptFileError):
            record = AnchorRecord.from_dict(checkpoint.records.get(name) or {})
            path = checkpoint.tag / anchor_file_name(record.sha256)
            if path.is_file() and not path.is_symlink():
                return WeightsAnchor(record=record, interval_steps=interval, path=path)
    return None
