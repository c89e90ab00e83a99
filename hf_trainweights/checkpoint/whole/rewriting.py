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

import torch

from hf_trainweights.checkpoint.encoded.reader import is_encoded, load_file, read_report
from hf_trainweights.checkpoint.manifest import (
    MANIFEST_NAME,
    PLAIN_MODE,
    FileEntry,
    Manifest,
    add_rounding,
    reported_rounding,
)
from hf_trainweights.checkpoint.run.anchors import unused_anchors
from hf_trainweights.checkpoint.run.checkpoints import converted_weights_problem
from hf_trainweights.checkpoint.run.job import SaveJob, manifest_fields, rewriting, write_complete_manifest
from hf_trainweights.checkpoint.run.verification import (
    RESUMED_FROM,
    anchor_problem,
    file_problem,
    require_intact,
    require_undamaged,
    weights_problem,
)
from hf_trainweights.checkpoint.whole.sources import (
    ADAPTER_WEIGHTS_NAME,
    FSDP_WEIGHTS_NAME,
    OPTIMIZER_NAMES,
    Inventory,
    OptimizerFile,
    is_lossy,
    load_if_possible,
    take_inventory,
    weights_to_store,
)
from hf_trainweights.checkpoint.whole.writer import WEIGHTS_NAME, Weights, save_tree, save_weights
from hf_trainweights.errors import UnstorableError
from hf_trainweights.files import disk
from hf_trainweights.files.atomic import freeing_in_background, move_file, remove_files, replace_by_link, replace_file
from hf_trainweights.files.disk import temporary_path
from hf_trainweights.files.reading import is_torch_file
from hf_trainweights.files.safetensors_file import TensorToWrite, write_safetensors
from hf_trainweights.files.weight_files import ENTRY_POINTS, safetensors_files

# Smaller ones are left alone: RNG states, schedulers, scalers, training_args.bin.
_MIN_OTHER_BYTES = 64 << 10

# In a manifest's metadata: the weights file that stands for safetensors, of a model without training state.
_WAS_SAFETENSORS = "was_safetensors"


class WholeLayout:
    """A checkpoint in whole files, as a Trainer on one rank or a plain loop writes it."""

    def __init__(self, path: Path):
        self.path = path
        self.directories = [path]

    def missing_problem(self) -> str | None:
        """Say that there are no weights, or return None."""
        return None if self._weights() else "no weight file is there"

    def problem(self) -> str | None:
        """Say why a resume could not read the files, as far as checksums and anchors show, or return None."""
        weights = self._weights()[:1]
        if not weights:
            return self.missing_problem()
        others = [self.path / name for name in RESUMED_FROM if (self.path / name).exists()]
        checks = [(weights_problem, weights), (file_problem, others), (anchor_problem, weights + others)]
        return next(filter(None, (check(file) for check, files in checks for file in files)), None)

    def unlisted(self, directory: Path) -> list[Path]:
        """List what an interrupted save has left."""
        return unused_anchors(directory)

    def rewriting_bytes(self) -> int:
        """Return the free space that rewriting takes: one encoded file at a time beside the plain ones."""
        sizes = [file.stat().st_size for file in self.path.iterdir() if file.is_file()]
        shards = sum(file.stat().st_size for file in safetensors_files(self.path))  # they become one file
        return max([shards, *sizes])

    def compress(self, job: SaveJob) -> Manifest:
        """Make the files small; with the same choices a second call changes nothing."""
        with freeing_in_background(self.path):
            return self._compress(job)

    def _compress(self, job: SaveJob) -> Manifest:
        path, inventory = self.path, take_inventory(self.path)
        if not job.weights_only:
            inventory.require_training_state()
        previous = self._verified()
        # With the same choices a second call finds nothing left to do.
        recorded: dict[str, Any] = {"policy": job.policy.to_dict(), "keep_weights": job.keep_weights}
        if job.base is not None:
            recorded["anchor"] = [str(job.base.path), job.base.keep]
        if previous and recorded.items() <= previous.metadata.items():
            return previous
        require_undamaged(path, previous.files if previous else ())
        optimizer = OptimizerFile.read(path, job.policy, job.optimizer_names)
        keeps = job.keep_weights or _must_keep_weights(path)
        weights = None if keeps else weights_to_store(inventory, job.policy, previous, job.buffers, optimizer)
        with rewriting(path):
            entries, fields = _compress_weights(job, inventory, previous, weights)
            entries |= _compress_others(job, inventory, optimizer, done=entries)
            fields |= manifest_fields(path, previous, job.metrics, recorded)
            had_safetensors = any(file.suffix == ".safetensors" for file in inventory.weight_files)
            if job.weights_only and weights is not None and had_safetensors:
                fields["metadata"][_WAS_SAFETENSORS] = weights.file_name
            return write_complete_manifest(path, previous, Manifest(entries, job.policy.mode, **fields))

    def restore(self) -> Manifest:
        """Turn the files back into plain ones that torch.load reads without this package."""
        path, inventory = self.path, take_inventory(self.path)
        previous = self._verified()
        require_undamaged(path, previous.files if previous else ())
        lost = dict(previous.rounded_before) if previous else {}
        with rewriting(path):
            for file in filter(is_torch_file, sorted([*inventory.weight_files, *inventory.other_files])):
                if is_encoded(file) and (rounding := _restore_file(file)):
                    lost[file.name] = add_rounding(lost.get(file.name, {}), rounding)
            fields = manifest_fields(path, previous)
            weights_name = fields["metadata"].pop(_WAS_SAFETENSORS, None)
            if weights_name in (WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME) and (path / weights_name).is_file():
                name = _to_safetensors(path / weights_name)
                lost |= {name: lost.pop(weights_name)} if weights_name in lost else {}
            return write_complete_manifest(path, None, Manifest({}, PLAIN_MODE, rounded_before=lost, **fields))

    def _weights(self) -> list[Path]:
        """Return the files of weights that a loader may open first, those of further adapters in their own folders."""
        folders = [self.path, *sorted(path for path in self.path.iterdir() if path.is_dir())]
        return [folder / name for folder in folders for name in ENTRY_POINTS if (folder / name).is_file()]

    def _verified(self) -> Manifest | None:
        return require_intact(self.path) if (self.path / MANIFEST_NAME).exists() else None


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
    entries, anchor = save_weights(job, weights)
    twin = job.path / FSDP_WEIGHTS_NAME
    if weights.file_name == WEIGHTS_NAME and twin.exists():
        replace_by_link(job.path / WEIGHTS_NAME, twin)
        entries[twin.name] = entries[WEIGHTS_NAME]
    remove_files(inventory.replaced_by(weights.file_name))
    return entries, anchor


def _restore_file(file: Path) -> dict[str, float]:
    """Write a plain file in the place of an encoded one, and return by role what this had lost."""
    tree, rounding, status = load_file(file), reported_rounding(read_report(file)), file.stat()
    with replace_file(file) as plain:
        torch.save(tree, plain)
    # Where two files hold an optimizer's state the newer one counts.
    disk.file_system.set_times(file, status.st_atime_ns, status.st_mtime_ns)
    return rounding


def _to_safetensors(file: Path) -> str:
    """Write a plain file of weights as safetensors in its place, tensor by tensor, and return the new name."""
    target = file.with_name("model.safetensors" if file.name == WEIGHTS_NAME else "adapter_model.safetensors")
    aside = temporary_path(file.parent)
    try:
        write_safetensors(
            aside,
            # As arguments alone: Windows removes no file from which something is mapped.
            {name: TensorToWrite.of(each) for name, each in load_file(file, map_location="cpu", mmap=True).items()},
            {"format": "pt"},
        )
        move_file(aside, target)
    finally:
        remove_files([aside])
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
        plan = optimizer.plan if is_optimizer else job.policy.plan_tree(tree)
        try:
            entries[file.name] = save_tree(job, file.name, tree, plan)
        except UnstorableError as error:
            warnings.warn(f"{file} stays as it is: {error}", stacklevel=3)
    return entries


def replace_weights(path: Path, weights: Mapping[str, Any]) -> None:
    """Put weights in the place of a checkpoint's weight files, plain and as fast as torch.save writes them.

    A Trainer resumes exactly from the module's names, and its own files may have others. After an error the old weights
    are there, or the new ones.
    """
    inventory = take_inventory(path)
    with rewriting(path):
        with replace_file(path / WEIGHTS_NAME) as file:
            torch.save(dict(weights), file)
        remove_files(inventory.replaced_by(WEIGHTS_NAME))
