"""A checkpoint directory as a whole: written aside and renamed into place, removed in one step, cleaned up after.

| file | what |
|---|---|
| `pytorch_model.bin`, `adapter_model.bin` | weights, a flat state dict under module names; encoded |
| `optimizer.pt` and other torch files | any tree; encoded |
| `<sha256>.anchor` | hard link to the weights that these weights are stored against, if they are |
| `trainweights.json` | the manifest, written last |
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from hf_trainweights.checkpoint.directory.anchor_choice import (
    ANCHOR_EVERY_SAVES,
    AnchorSource,
    AnchorState,
    EncodedWeights,
    encode_against,
    encode_full,
    expected_drift_rms,
    link_anchor,
)
from hf_trainweights.checkpoint.directory.discovery import checkpoint_directories
from hf_trainweights.checkpoint.directory.manifest import FileEntry, Manifest, write_manifest
from hf_trainweights.checkpoint.encoded.anchor_files import anchor_file_name
from hf_trainweights.checkpoint.encoded.encoder import EncodedFile, encode_file
from hf_trainweights.checkpoint.encoded.key_paths import UnstorableError
from hf_trainweights.checkpoint.encoded.plan import Plan
from hf_trainweights.checkpoint.encoded.reader import is_encoded, read_structure
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.errors import CorruptFileError, SaveError
from hf_trainweights.files import atomic
from hf_trainweights.files.atomic import TEMPORARY_PREFIX, DigestedFile, create_directory, create_file

WEIGHTS_NAME = "pytorch_model.bin"

OpenFile = Callable[[Path], AbstractContextManager[BinaryIO]]


@dataclass(frozen=True)
class Weights:
    """The weights of a checkpoint and what is known about them.

    Args:
        state: A flat state dict under module names.
        buffers: Names in it that are buffers; they are exact in every mode.
        optimizer: The optimizer's state dict, from which the drift of the weights is estimated.
        optimizer_names: Its parameters' names by their index in it.
        file_name: The file they go to.
    """

    state: Mapping[str, Any]
    buffers: Collection[str] = ()
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    optimizer_names: Mapping[Any, str] = field(default_factory=dict)
    file_name: str = WEIGHTS_NAME


@contextlib.contextmanager
def saving(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses while `path` is written into a `SaveError`.

    Args:
        path: The checkpoint directory.

    Yields:
        Nothing.

    Raises:
        SaveError: The block raised an OSError.
    """
    try:
        yield
    except SaveError:
        raise
    except OSError as error:
        next_step = "Free space or mend the disk and save again; earlier checkpoints are untouched."
        raise SaveError(str(path), "a disk that takes the checkpoint", str(error), next_step) from error


def save_directory(
    path: Path,
    policy: Policy,
    weights: Weights,
    trees: Mapping[str, tuple[Any, Plan]],
    *,
    anchor: AnchorSource | None = None,
    anchor_every: int = ANCHOR_EVERY_SAVES,
    **manifest_fields: Any,
) -> Manifest:
    """Write a checkpoint directory; it appears whole or not at all.

    Args:
        path: A missing or an empty directory.
        policy: Which codec for which tensor.
        weights: The weights.
        trees: File name to what else is to be stored, and how.
        anchor: What the weights may be stored against. Default: they stand alone.
        anchor_every: The most checkpoints one anchor serves.
        **manifest_fields: Fields of `Manifest`: step, epoch, metrics, metadata.

    Returns:
        The manifest that was written.

    Raises:
        UnstorableError: A value cannot be stored; the error names file and key.
        ConfigError: The manifest's fields hold something that JSON cannot.
        SaveError: `path` holds something, or the disk is full or refuses; nothing is left behind.
    """
    with saving(path), create_directory(path) as temporary:
        files, state = write_weights(
            temporary, policy, weights, anchor=anchor, anchor_every=anchor_every, final=path, open_file=create_file
        )
        for name, (tree, plan) in trees.items():
            with naming(name):
                encoded = encode_file(tree, plan, spool_directory=temporary)
            files[name] = write_encoded(temporary / name, encoded, create_file)
        manifest = Manifest(files, policy.mode, anchor=state and state.to_dict(), **manifest_fields)
        write_manifest(temporary, manifest)
    return manifest


@contextlib.contextmanager
def naming(part: str) -> Iterator[None]:
    """Put the name of a file or part before the key that an `UnstorableError` names.

    Args:
        part: The name.

    Yields:
        Nothing.

    Raises:
        UnstorableError: The block raised one.
    """
    try:
        yield
    except UnstorableError as error:
        raise UnstorableError(f"{part}: {error.where}", error.expected, error.found, error.next_step) from error


def write_weights(
    directory: Path,
    policy: Policy,
    weights: Weights,
    *,
    anchor: AnchorSource | None,
    anchor_every: int,
    final: Path,
    open_file: OpenFile,
) -> tuple[dict[str, FileEntry], AnchorState | None]:
    """Write a weights file, and beside it a link to the anchor if it needs one.

    Args:
        directory: Where to write.
        policy: Which codec for which tensor.
        weights: The weights.
        anchor: What they may be stored against.
        anchor_every: The most checkpoints one anchor serves.
        final: Where `directory` will be when the checkpoint is complete.
        open_file: `create_file` or `replace_file`.

    Returns:
        Manifest entries of the files written, and the state of the anchor that the next checkpoint may use.

    Raises:
        UnstorableError: A value cannot be stored; the error names file and key.
        OSError: The disk is full or refuses.
    """
    with naming(weights.file_name):
        result = _encode_weights(directory, policy, weights, anchor, anchor_every, final)
    entry = write_encoded(directory / weights.file_name, result.encoded, open_file)
    if result.anchor is not None:
        link = directory / anchor_file_name(result.anchor.sha256)
        link_entry = FileEntry(link.stat().st_size, result.anchor.sha256)  # verified when it was opened
        return {weights.file_name: entry, link.name: link_entry}, result.anchor
    can_be_anchor = all(isinstance(value, Tensor) for value in weights.state.values())
    return {weights.file_name: entry}, AnchorState(entry.sha256) if can_be_anchor else None


def _encode_weights(
    directory: Path, policy: Policy, weights: Weights, source: AnchorSource | None, anchor_every: int, final: Path
) -> EncodedWeights:
    result = None
    if source is not None and not source.state.is_spent(anchor_every):
        anchor = link_anchor(source, directory)
        if anchor is not None:
            link = final / anchor.path.name
            result = encode_against(
                weights.state,
                policy,
                anchor,
                source,
                buffers=weights.buffers,
                anchor_link=link,
                spool_directory=directory,
            )
            if result is None or result.anchor is None:
                atomic.file_system.unlink(anchor.path)
    if result is not None:
        return result
    drift_rms = source.step_rms if source else {}
    plan = policy.plan_anchor(weights.state, buffers=weights.buffers)
    if not drift_rms and any(each.round_to for each in plan.values()):
        drift_rms = expected_drift_rms(weights.optimizer, weights.optimizer_names)
    return encode_full(weights.state, policy, buffers=weights.buffers, drift_rms=drift_rms, spool_directory=directory)


def write_encoded(path: Path, encoded: EncodedFile, open_file: OpenFile) -> FileEntry:
    """Write an encoded file, durably.

    Args:
        path: Its name.
        encoded: Its content.
        open_file: `create_file` or `replace_file`.

    Returns:
        Its manifest entry.

    Raises:
        OSError: The disk is full or refuses.
    """
    with open_file(path) as file:
        digested = DigestedFile(file)
        torch.save(encoded, cast("BinaryIO", digested))  # it has the two methods that torch.save calls
    report = {
        "anchor": encoded.anchor_sha256,
        "tensors": [dict(vars(tensor)) for tensor in encoded.report],
    }
    return FileEntry(digested.size_bytes, digested.sha256(), report)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint directory: it is gone in one step, its files follow.

    Args:
        path: The directory. Other checkpoints keep their own links to anchors it holds.

    Raises:
        OSError: The disk refuses.
    """
    aside = atomic.temporary_path(path.parent)
    atomic.file_system.rename(path, aside)
    atomic.file_system.sync_directory(path.parent)
    atomic.remove_tree(aside)


def collect_garbage(root: str | Path, *, dry_run: bool = False) -> list[Path]:
    """Remove what interrupted saves left behind in a run: temporary files, and anchors that no file refers to.

    Args:
        root: Where the run keeps its `checkpoint-<step>` directories, or one of these.
        dry_run: Only say what would be removed.

    Returns:
        Paths that were removed, sorted. What a living process of this machine is writing stays.

    Raises:
        OSError: Something cannot be read or removed.

    Example:
        >>> import tempfile
        >>> collect_garbage(tempfile.mkdtemp())
        []
    """
    root = Path(root)
    directories = checkpoint_directories(root)
    garbage = [path for directory in (root, *directories) for path in abandoned_files(directory)]
    garbage += [path for directory in (root, *directories) for path in unused_anchors(directory)]
    for path in () if dry_run else garbage:
        if path.is_dir() and not path.is_symlink():
            atomic.remove_tree(path)
        else:
            atomic.file_system.unlink(path)
    return sorted(garbage)


def abandoned_files(directory: Path) -> list[Path]:
    """List temporary files and directories whose writer no longer runs on this machine.

    Args:
        directory: It is looked in directly, not below.

    Returns:
        Their paths.

    Raises:
        OSError: The directory cannot be read.
    """
    return [path for path in directory.glob(f"{TEMPORARY_PREFIX}*") if not _is_being_written(path)]


def _is_being_written(path: Path) -> bool:
    pid = path.name.removeprefix(TEMPORARY_PREFIX).partition("-")[0]
    if not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)  # signal 0 is not sent: it only asks whether the process is there
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def unused_anchors(directory: Path) -> list[Path]:
    """List anchors that no encoded file beside them refers to.

    Args:
        directory: A checkpoint directory.

    Returns:
        Their paths; none where it cannot be told what an encoded file, one of a newer version say, refers to.

    Raises:
        OSError: The directory cannot be read.
    """
    anchors = set(directory.glob(anchor_file_name("*")))
    if not anchors:
        return []
    for path in directory.iterdir():
        if path not in anchors and path.is_file() and is_encoded(path):
            try:
                sha256 = read_structure(path).get("anchor", {}).get("sha256", "")
            except CorruptFileError:
                return []
            anchors.discard(directory / anchor_file_name(sha256))
    return sorted(anchors)
