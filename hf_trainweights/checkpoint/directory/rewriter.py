"""An existing checkpoint directory made small where it is, and plain again, one atomic file at a time.

The manifest goes first and comes back last, so between the two the directory is a plain one: at every moment each file
is whole, old or new, and Transformers loads it. A weights file is written before the ones it replaces go, because
loaders prefer those: `model.safetensors`, the index of shards, the shards.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from hf_trainweights.checkpoint.directory.completeness import require_undamaged
from hf_trainweights.checkpoint.directory.converted_weights import converted_weights_problem
from hf_trainweights.checkpoint.directory.in_place import (
    manifest_fields,
    rewriting,
    write_complete_manifest,
)
from hf_trainweights.checkpoint.directory.inventory import Inventory, is_torch_file, take_inventory
from hf_trainweights.checkpoint.directory.manifest import MANIFEST_NAME, FileEntry, Manifest
from hf_trainweights.checkpoint.directory.plain_weights import load_if_possible
from hf_trainweights.checkpoint.directory.rounding import PLAIN_MODE, add_rounding, reported_rounding
from hf_trainweights.checkpoint.directory.save_job import ANCHOR_EVERY_SAVES, BaseChoice, SaveJob
from hf_trainweights.checkpoint.directory.sources import (
    FSDP_WEIGHTS_NAME,
    OPTIMIZER_NAMES,
    OptimizerFile,
    is_lossy,
    weights_to_store,
)
from hf_trainweights.checkpoint.directory.verification import require_intact
from hf_trainweights.checkpoint.directory.weights_encoder import WEIGHTS_NAME, Weights
from hf_trainweights.checkpoint.directory.writer import save_tree, save_weights
from hf_trainweights.checkpoint.encoded.anchor_files import register_anchor_directory
from hf_trainweights.checkpoint.encoded.key_paths import UnstorableError
from hf_trainweights.checkpoint.encoded.reader import is_encoded, load_file, read_report
from hf_trainweights.checkpoint.planning.modes import ModeName
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.planning.tree_plan import plan_tree
from hf_trainweights.checkpoint.sharded.contents import dcp_directories
from hf_trainweights.checkpoint.sharded.in_place import compress_sharded, restore_sharded
from hf_trainweights.checkpoint.sharded.ranks import Ranks
from hf_trainweights.errors import UnsupportedError
from hf_trainweights.files import disk
from hf_trainweights.files.atomic import remove_files, replace_file
from hf_trainweights.files.links import replace_by_link

# Smaller ones are left alone: RNG states, schedulers, scalers, training_args.bin.
_MIN_OTHER_BYTES = 64 << 10


def compress_directory(
    path: str | Path,
    *,
    mode: ModeName = "lossless",
    rules: Mapping[str, Any] | None = None,
    keep_weights: bool = False,
    buffers: Collection[str] | None = None,
    optimizer_names: Mapping[Any, str] | None = None,
    metrics: Mapping[str, Any] | None = None,
    anchor_every: int = ANCHOR_EVERY_SAVES,
    anchor: str | Path | None = None,
    keep_base: bool = False,
) -> Manifest:
    """Turn a checkpoint directory of the Trainer, or of torch.save, into a small one.

    Weights become one `pytorch_model.bin` (`adapter_model.bin`), other torch files keep their names; a file that
    cannot be encoded stays as it is, with a warning. Calling it again with the same choices changes nothing.

    Args:
        path: The directory. Others called `checkpoint-<step>` beside it may hold the anchor.
        mode: A mode of `Policy`.
        rules: Rules of `Policy`.
        keep_weights: Leave the weight files as they are, plain.
        buffers: Names of weights that are buffers. Default: what an earlier save recorded, else see `find_buffers`.
        optimizer_names: Names of the optimizer's parameters by their index in `optimizer.pt`.
        metrics: For the manifest.
        anchor_every: The most checkpoints one anchor serves.
        anchor: Plain weights outside the run, a directory or a file, that its first checkpoint is stored against.
        keep_base: Keep those weights in the run, linked or copied, so that the checkpoint needs nothing outside.

    Returns:
        The manifest that was written.

    Raises:
        ConfigError: Mode or rules are wrong, a rule names nothing there, or there is nothing at `path` or `anchor`.
        CorruptFileError: A file is damaged or does not fit the manifest, or two files hold different states and nothing
            tells which one is newer; nothing has changed.
        UnsupportedError: It is of DeepSpeed, or of FSDP with LOCAL_STATE_DICT, or sharded and there is an `anchor`.
        SaveError: The disk is full or refuses; every file is whole, old or new.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp())
        >>> torch.save({"weight": torch.zeros(64, 64)}, path / "pytorch_model.bin")
        >>> compress_directory(path).mode
        'lossless'
    """
    path = Path(path).absolute()
    base = None if anchor is None else BaseChoice(Path(anchor).absolute(), keep_base)
    job = SaveJob.in_place(path, Policy(mode, rules or {}), anchor_every, base)
    if dcp_directories(path):
        return _compress_sharded(job, buffers, metrics)
    return _compress_whole_files(job, keep_weights, buffers, optimizer_names or {}, metrics)


def _compress_whole_files(
    job: SaveJob,
    keep_weights: bool,
    buffers: Collection[str] | None,
    optimizer_names: Mapping[Any, str],
    metrics: Mapping[str, Any] | None,
) -> Manifest:
    path, inventory = job.path, take_inventory(job.path)
    previous = require_intact(path) if (path / MANIFEST_NAME).exists() else None
    choices = _choices(job, keep_weights)
    if previous and choices.items() <= previous.metadata.items():
        return previous
    require_undamaged(path, previous.files if previous else ())
    register_anchor_directory(path)
    optimizer = OptimizerFile.read(path, job.policy, optimizer_names)
    keeps = keep_weights or _must_keep_weights(path)
    weights = None if keeps else weights_to_store(inventory, job.policy, previous, buffers, optimizer)
    with rewriting(path):
        entries, fields = _compress_weights(job, inventory, previous, weights)
        entries |= _compress_others(job, inventory, optimizer, done=entries)
        fields |= manifest_fields(path, previous, metrics, choices)
        return write_complete_manifest(path, previous, Manifest(entries, job.policy.mode, **fields))


def _choices(job: SaveJob, keep_weights: bool) -> dict[str, Any]:
    """Return what a second call must not differ in to find nothing left to do, as metadata of the manifest."""
    choices: dict[str, Any] = {"policy": job.policy.to_dict(), "keep_weights": keep_weights}
    return choices if job.base is None else {**choices, "anchor": [str(job.base.path), job.base.keep]}


def _must_keep_weights(path: Path) -> bool:
    problem = converted_weights_problem(path)
    if problem:
        warnings.warn(f"{path}: the weights stay as they are: {problem}", stacklevel=3)
    return bool(problem)


def _compress_sharded(job: SaveJob, buffers: Collection[str] | None, metrics: Mapping[str, Any] | None) -> Manifest:
    """Do in this process what the ranks of a sharded checkpoint would do."""
    if job.base is not None:
        next_step = "Leave `anchor` out: its first checkpoint is stored in full."
        raise UnsupportedError(str(job.path), "a checkpoint in whole files with `anchor`", "a sharded one", next_step)
    options: dict[str, Any] = {"buffers": buffers, "metrics": metrics, "anchor_every": job.anchor_every}
    return cast("Manifest", compress_sharded(job.path, job.policy, Ranks(), **options))  # it is the coordinator


def _compress_weights(
    job: SaveJob, inventory: Inventory, previous: Manifest | None, weights: Weights | None
) -> tuple[dict[str, FileEntry], dict[str, Any]]:
    """Save the weights in the place of the files that hold them; return their entries and fields of the manifest."""
    if weights is None:
        return {}, {"anchor": previous and previous.anchor, "base": previous and previous.base}
    saved = save_weights(job, weights)
    entries = saved.files
    twin = job.path / FSDP_WEIGHTS_NAME
    if weights.file_name == WEIGHTS_NAME and twin.exists():
        replace_by_link(job.path / WEIGHTS_NAME, twin)
        entries[twin.name] = entries[WEIGHTS_NAME]
    remove_files(inventory.replaced_by(weights.file_name))
    return entries, {"anchor": saved.anchor and saved.anchor.to_dict(), "base": saved.base}


def restore_directory(path: str | Path) -> Manifest:
    """Turn a small checkpoint directory back into plain files that torch.load reads without this package.

    Args:
        path: The directory. It may have been moved.

    Returns:
        The manifest that was written, its mode "plain".

    Raises:
        ConfigError: There is no checkpoint at `path`.
        CorruptFileError: Something in it is damaged; nothing has changed unless only decoding shows it.
        MissingAnchorError: It was moved without the anchor it needs.
        SaveError: The disk is full or refuses; every file is whole, small or plain.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp())
        >>> torch.save({"weight": torch.zeros(64, 64)}, path / "pytorch_model.bin")
        >>> compress_directory(path).mode, restore_directory(path).mode
        ('lossless', 'plain')
    """
    path = Path(path).absolute()
    if dcp_directories(path):
        return restore_sharded(path)
    inventory = take_inventory(path)
    previous = require_intact(path) if (path / MANIFEST_NAME).exists() else None
    require_undamaged(path, previous.files if previous else ())
    register_anchor_directory(path)
    lost = dict(previous.rounded_before) if previous else {}
    with rewriting(path):
        for file in filter(is_torch_file, sorted([*inventory.weight_files, *inventory.other_files])):
            if is_encoded(file):
                tree, rounding, status = load_file(file), reported_rounding(read_report(file)), file.stat()
                with replace_file(file) as plain:
                    torch.save(tree, plain)
                # Where two files hold an optimizer's state the newer one counts.
                disk.file_system.set_times(file, status.st_atime_ns, status.st_mtime_ns)
                if rounding:
                    lost[file.name] = add_rounding(lost.get(file.name, {}), rounding)
        fields = manifest_fields(path, previous)
        return write_complete_manifest(path, None, Manifest({}, PLAIN_MODE, rounded_before=lost, **fields))


def _compress_others(
    job: SaveJob, inventory: Inventory, optimizer: OptimizerFile, done: Collection[str]
) -> dict[str, FileEntry]:
    """Write other files than those of weights anew, unless one is small or would lose something."""
    entries = {}
    for file in inventory.other_files:
        is_optimizer = file.name in OPTIMIZER_NAMES
        is_worth_it = is_optimizer or file.stat().st_size >= _MIN_OTHER_BYTES
        if file.name in done or not is_worth_it or is_lossy(file):
            continue
        if is_optimizer and file.name != optimizer.name:
            warnings.warn(f"{file} stays as it is: it is no newer than {optimizer.name}", stacklevel=3)
            continue
        tree = optimizer.tree if is_optimizer else load_if_possible(file)
        if tree is None:
            warnings.warn(f"{file} stays as it is: it holds more than plain data", stacklevel=3)
            continue
        plan = optimizer.plan if is_optimizer else plan_tree(tree, job.policy)
        try:
            entries[file.name] = save_tree(job, file.name, tree, plan)
        except UnstorableError as error:
            warnings.warn(f"{file} stays as it is: {error}", stacklevel=3)
    return entries
