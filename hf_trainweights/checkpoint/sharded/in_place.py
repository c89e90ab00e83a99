"""Sharded checkpoints that are made small, or plain again, where they lie: a DCP directory, or a Trainer's checkpoint.

In a Trainer's checkpoint the DCP directories are rewritten one after the other, and a manifest of the whole checkpoint
goes first and comes back last, as for a checkpoint in files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_trainweights.checkpoint.dcp.contents import ShardedContents, dcp_directories, encoded_manifest
from hf_trainweights.checkpoint.dcp.parts import all_weights, optimizer_tensors
from hf_trainweights.checkpoint.manifest.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    read_manifest,
    write_manifest,
)
from hf_trainweights.checkpoint.manifest.rounding import PLAIN_MODE, add_rounding, total_rounding
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.run.discovery import checkpoint_directories
from hf_trainweights.checkpoint.run.in_place import manifest_fields, rewriting, write_complete_manifest
from hf_trainweights.checkpoint.run.ranks import Ranks
from hf_trainweights.checkpoint.run.verification import require_intact
from hf_trainweights.checkpoint.sharded.conversion import write_plain_in_place
from hf_trainweights.checkpoint.sharded.rewriting import Rewriting
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.cleanup import remove_abandoned
from hf_trainweights.files.save_errors import save_errors
from hf_trainweights.files.temporary import lock_directory


def compress_sharded(
    path: Path,
    policy: Policy,
    ranks: Ranks,
    *,
    buffers: Collection[str] | None = None,
    metrics: Mapping[str, Any] | None = None,
    anchor_every: int,
) -> Manifest:
    """Make a sharded checkpoint small where it lies; what was rounded before stays as it is.

    Each of the ranks encodes the files that it wrote; of several, the coordinator calls this within `ranks.decide`.
    `buffers` are by default the weights that have no state in the optimizer. An anchor serves up to `anchor_every`
    checkpoints. ConfigError: a rule names nothing there. CorruptFileError, SaveError: every file is whole, old or new.
    """
    choices = {"policy": policy.to_dict(), "keep_weights": False}
    previous = _verified(path)
    if previous is not None and choices.items() <= previous.metadata.items():
        return previous
    with _held(path):
        step = manifest_fields(path, previous).get("step")
        for job in _jobs(path, policy, buffers, anchor_every, step, choices):
            job.run(ranks)
        return _finish(path, previous, policy.mode, metrics, choices)


def restore_sharded(path: Path) -> Manifest:
    """Turn a small sharded checkpoint into plain DCP files where it lies; after an error each is small or plain."""
    previous = _verified(path)
    with _held(path):
        lost: dict[str, dict[str, float]] = {}
        for directory in dcp_directories(path):
            rounding = _rounding(path, directory, previous)
            for name in write_plain_in_place(ShardedContents(directory)):
                if rounding:
                    lost[(directory / name).relative_to(path).as_posix()] = rounding
        fields = manifest_fields(path, previous)
        return write_complete_manifest(path, None, Manifest({}, PLAIN_MODE, rounded_before=lost, **fields))


def _verified(path: Path) -> Manifest | None:
    if not (path / MANIFEST_NAME).exists():
        return None
    if dcp_directories(path) == [path] and encoded_manifest(path) is None:
        return None  # a process died before its .metadata followed, or it is plain
    return require_intact(path)


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    directories = dcp_directories(path)
    with contextlib.ExitStack() as stack:
        if directories != [path]:
            stack.enter_context(rewriting(path))
        stack.enter_context(save_errors(path, "Every file there is whole, old or new."))
        for directory in directories:
            stack.enter_context(lock_directory(directory, wait=True))
            remove_abandoned(directory)
        yield


def _jobs(
    path: Path,
    policy: Policy,
    buffers: Collection[str] | None,
    anchor_every: int,
    step: int | None,
    choices: Mapping[str, Any],
) -> list[Rewriting]:
    contents = [ShardedContents(directory) for directory in dcp_directories(path)]
    weights = [name for each in contents for name in all_weights(each)]
    states = [name.split(".", 1)[1].rpartition(".")[0] for each in contents for name in optimizer_tensors(each)]
    policy.require_used([*weights, *states])
    if buffers is None and set(states) & set(weights):
        buffers = sorted(set(weights) - set(states))
    jobs = []
    for each in contents:
        manifest = encoded_manifest(each.directory)
        if manifest is not None and total_rounding(manifest):
            continue  # encoding it again would add to its error, or hide it
        anchor = _anchor(path, each.directory)
        jobs.append(Rewriting(each.directory, policy, anchor, buffers, anchor_every, step, choices))
    return jobs


def _anchor(path: Path, directory: Path) -> Path | None:
    """Return the newest directory of the same kind that has anchors, in another checkpoint of the run."""
    for other in checkpoint_directories(path.parent):
        candidate = other / directory.relative_to(path)
        if other == path or not (candidate / MANIFEST_NAME).exists():
            continue
        try:
            anchor = read_manifest(candidate).sharded.get("anchor")
        except (CorruptFileError, OSError):
            continue
        if anchor and anchor.get("files"):
            return candidate
    return None


def _finish(
    path: Path, previous: Manifest | None, mode: str, metrics: Mapping[str, Any] | None, choices: Mapping[str, Any]
) -> Manifest:
    entries: dict[str, FileEntry] = {}
    lost: dict[str, Mapping[str, float]] = {}
    for directory in dcp_directories(path):
        manifest = read_manifest(directory)
        before = _earlier_rounding(path, directory, previous)
        if before:
            manifest = replace(manifest, rounded_before=dict.fromkeys(_items_of(manifest), before))
            write_manifest(directory, manifest)
        if directory == path:
            return manifest
        prefix = directory.relative_to(path).as_posix()
        entries |= {f"{prefix}/{name}": entry for name, entry in manifest.files.items()}
        lost |= {f"{prefix}/{name}": value for name, value in manifest.rounded_before.items()}
    fields = manifest_fields(path, previous, metrics, choices)
    return write_complete_manifest(path, None, Manifest(entries, mode, rounded_before=lost, **fields))


def _items_of(manifest: Manifest) -> list[str]:
    return [name for name, entry in manifest.files.items() if entry.report.get("tensors")]


def _earlier_rounding(path: Path, directory: Path, previous: Manifest | None) -> dict[str, float]:
    """Return what the values in a directory had lost before they were last encoded, the largest of all its files."""
    prefix = "" if directory == path else f"{directory.relative_to(path).as_posix()}/"
    largest: dict[str, float] = {}
    for name, lost in (previous.rounded_before if previous else {}).items():
        for role, error in lost.items() if name.startswith(prefix) else ():
            largest[role] = max(error, largest.get(role, 0.0))
    return largest


def _rounding(path: Path, directory: Path, previous: Manifest | None) -> dict[str, float]:
    manifest = encoded_manifest(directory)
    own = total_rounding(replace(manifest, rounded_before={})) if manifest else {}
    return add_rounding(_earlier_rounding(path, directory, previous), own)
