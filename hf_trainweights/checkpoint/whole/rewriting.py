"""An existing checkpoint directory made small where it is, and plain again, one atomic file at a time.

The manifest goes first and comes back last, so between the two the directory is a plain one: at every moment each file
is whole, old or new, and Transformers loads it. A weights file is written before the ones it replaces go, because
loaders prefer those: `model.safetensors`, the index of shards, the shards.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from hf_trainweights.checkpoint.encoded.anchor_files import register_anchor_directory
from hf_trainweights.checkpoint.encoded.key_paths import UnstorableError
from hf_trainweights.checkpoint.encoded.reader import is_encoded, load_file, read_report
from hf_trainweights.checkpoint.manifest.manifest import MANIFEST_NAME, FileEntry, Manifest
from hf_trainweights.checkpoint.manifest.rounding import PLAIN_MODE, add_rounding, reported_rounding
from hf_trainweights.checkpoint.planning.tree_plan import plan_tree
from hf_trainweights.checkpoint.run.completeness import require_undamaged
from hf_trainweights.checkpoint.run.converted_weights import converted_weights_problem
from hf_trainweights.checkpoint.run.in_place import (
    manifest_fields,
    rewriting,
    write_complete_manifest,
)
from hf_trainweights.checkpoint.run.save_job import SaveJob
from hf_trainweights.checkpoint.run.verification import require_intact
from hf_trainweights.checkpoint.whole.inventory import Inventory, take_inventory
from hf_trainweights.checkpoint.whole.plain_weights import load_if_possible
from hf_trainweights.checkpoint.whole.sources import (
    ADAPTER_WEIGHTS_NAME,
    FSDP_WEIGHTS_NAME,
    OPTIMIZER_NAMES,
    OptimizerFile,
    is_lossy,
    weights_to_store,
)
from hf_trainweights.checkpoint.whole.weights_encoder import WEIGHTS_NAME, Weights
from hf_trainweights.checkpoint.whole.writer import save_tree, save_weights
from hf_trainweights.files import disk
from hf_trainweights.files.atomic import remove_files, replace_file
from hf_trainweights.files.links import replace_by_link
from hf_trainweights.files.torch_zip import is_torch_file

# Smaller ones are left alone: RNG states, schedulers, scalers, training_args.bin.
_MIN_OTHER_BYTES = 64 << 10

# In a manifest's metadata: the weights file that stands for safetensors, of a model without training state.
_WAS_SAFETENSORS = "was_safetensors"


def compress_whole(
    job: SaveJob,
    keep_weights: bool,
    buffers: Collection[str] | None,
    optimizer_names: Mapping[Any, str],
    metrics: Mapping[str, Any] | None,
    *,
    weights_only: bool,
) -> Manifest:
    """Make the whole files of a checkpoint small; calling it again with the same choices changes nothing."""
    path, inventory = job.path, take_inventory(job.path)
    if not weights_only:
        inventory.require_training_state()
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
        if (
            weights_only
            and weights is not None
            and any(file.suffix == ".safetensors" for file in inventory.weight_files)
        ):
            fields["metadata"][_WAS_SAFETENSORS] = weights.file_name
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


def restore_whole(path: Path) -> Manifest:
    """Turn whole files back into plain ones that torch.load reads without this package."""
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
        weights_name = fields["metadata"].pop(_WAS_SAFETENSORS, None)
        if weights_name in (WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME) and (path / weights_name).is_file():
            name = _to_safetensors(path / weights_name)
            lost |= {name: lost.pop(weights_name)} if weights_name in lost else {}
        return write_complete_manifest(path, None, Manifest({}, PLAIN_MODE, rounded_before=lost, **fields))


def _to_safetensors(file: Path) -> str:
    """Write a plain file of weights as safetensors in its place, and return the new name."""
    target = file.with_name("model.safetensors" if file.name == WEIGHTS_NAME else "adapter_model.safetensors")
    state = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in load_file(file).items()}
    with replace_file(target) as plain:
        plain.write(safetensors.torch.save(state, metadata={"format": "pt"}))
    remove_files([file])
    return target.name


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
