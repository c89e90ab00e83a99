"""Compress an existing checkpoint directory in place and restore it, one atomic file at a time.

The files are listed and read once before any of them changes. The manifest is removed first and written last; in
between the directory counts as a plain one. At every moment each file is intact, old or new, and Transformers loads it.
Loaders prefer the files that a new weights file replaces (`model.safetensors`, the index of shards, the shards). So the
new one is written before the old ones are removed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.checkpoint.encoded.objects import stand_ins
from hf_trainweights.checkpoint.encoded.reader import load_file
from hf_trainweights.checkpoint.manifest import PLAIN_MODE, FileEntry, Manifest, add_rounding
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.planning.roles import find_buffers, is_optimizer_state, recorded_names
from hf_trainweights.checkpoint.run.anchors import unused_anchors
from hf_trainweights.checkpoint.run.checkpoints import (
    FSDP_WEIGHTS_NAME,
    OPTIMIZER_NAMES,
    PROGRESS_NAMES,
    RESUMED_FROM,
    STATE_NAME,
    TRAINER_STATE_NAME,
    converted_weights_problem,
    entry_points,
    intact_manifest,
)
from hf_trainweights.checkpoint.run.file_checks import SMALL_BYTES, anchor_problem, weights_problem
from hf_trainweights.checkpoint.run.in_place import Listing, rewriting
from hf_trainweights.checkpoint.run.job import RewriteJob
from hf_trainweights.checkpoint.run.weight_files import (
    is_lossy,
    read_weights,
    require_packages,
    restore_file,
    weight_files,
)
from hf_trainweights.checkpoint.run.weights import WEIGHTS_NAME, Weights
from hf_trainweights.checkpoint.whole.plain_files import to_safetensors
from hf_trainweights.checkpoint.whole.writer import recorded_states, save_tree, save_weights
from hf_trainweights.errors import ConfigError, CorruptFileError, UnstorableError, UnsupportedError
from hf_trainweights.files.atomic import freeing_in_background, remove_files, replace_by_link, replace_file
from hf_trainweights.files.digests import digest_files
from hf_trainweights.files.reading import is_torch_file
from hf_trainweights.files.weight_files import ENTRY_POINTS, safetensors_files

ADAPTER_WEIGHTS_NAME = "adapter_model.bin"

_SHARDED_STATE = ("pytorch_model_fsdp_*", "optimizer_*[0-9]", "global_step*", "*.distcp", "zero_to_fp32.py")
# Files that accelerate's save_state writes beside weights, and a Trainer does not.
_ACCELERATE_STATE = "random_states_*.pkl"
_MODEL_CONFIGS = ("config.json", "adapter_config.json")

# A key in a manifest's metadata: the weights file that replaced safetensors files of a model without training state.
_WAS_SAFETENSORS = "was_safetensors"


class WholeLayout:
    """A checkpoint in whole files, as a Trainer on one rank or a plain loop writes it."""

    def __init__(self, path: Path):
        self.path = path
        self.directories = [path]

    def missing_problem(self) -> str | None:
        """Return a sentence if there are no weights, else None."""
        return None if entry_points(self.path) else "no weight file is there"

    def problem(self) -> str | None:
        """Return why a resume could not read the files, as checksums and anchors show, or None if it could."""
        other_files = [self.path / name for name in RESUMED_FROM if (self.path / name).exists()]
        files = [*entry_points(self.path)[:1], *other_files]
        problems = (check(file) for check in (weights_problem, anchor_problem) for file in files)
        return self.missing_problem() or next(filter(None, problems), None)

    def unlisted(self, directory: Path) -> list[Path]:
        """List the files that an interrupted save has left: anchors that are not needed."""
        return unused_anchors(directory)

    def rewriting_bytes(self) -> int:
        """Return the free bytes that rewriting takes: one new file at a time is written beside the old ones."""
        sizes = [file.stat().st_size for file in self.path.iterdir() if file.is_file()]
        shard_bytes = sum(file.stat().st_size for file in safetensors_files(self.path))  # they become one file
        return max([shard_bytes, *sizes])

    def compress(self, job: RewriteJob) -> Manifest:
        """Compress the files; a second call with the same choices changes nothing."""
        # The tensors that are mapped from the files are gone when the call has returned, before the block ends.
        with freeing_in_background(self.path):
            return self._compress(job)

    def _compress(self, job: RewriteJob) -> Manifest:
        path, inventory = self.path, Inventory(self.path)
        if not job.weights_only:
            inventory.require_training_state()
        previous = intact_manifest(path)
        # The manifest records these choices, so that a second call with the same ones returns at once.
        recorded: dict[str, Any] = {"policy": job.policy.to_dict(), "keep_weights": job.keep_weights}
        if job.base is not None:
            recorded["anchor"] = [str(job.base.path), job.base.keep]
        if previous and job.is_done(previous, recorded):
            return previous
        listing = Listing.read(path, previous)
        optimizer = OptimizerFile(path, job.policy, job.optimizer_names, job.class_after(previous))
        weights = _weights_to_store(job, inventory, listing, optimizer)
        with rewriting(path):
            entries, fields = _compress_weights(job, inventory, previous, weights)
            entries |= _compress_others(job, inventory, listing, optimizer, done=entries)
            if optimizer.name in entries:
                recorded |= recorded_states(job, optimizer.class_name, entries[optimizer.name])
            fields |= listing.manifest_fields(job.metrics, recorded)
            had_safetensors = any(file.suffix == ".safetensors" for file in inventory.weight_files)
            if job.weights_only and weights is not None and had_safetensors:
                fields["metadata"][_WAS_SAFETENSORS] = weights.file_name
            return listing.write_manifest(Manifest(entries, job.policy.mode, **fields))

    def restore(self) -> Manifest:
        """Replace the files by plain ones that torch.load reads without this package.

        UnsupportedError: a package is not installed whose objects the files hold; nothing has changed.
        """
        path, inventory = self.path, Inventory(self.path)
        previous = intact_manifest(path)
        listing = Listing.read(path, previous)
        roundings, entries = dict(previous.rounded_before) if previous else {}, {}
        files = {file: listing.structure(file) for file in sorted([*inventory.weight_files, *inventory.other_files])}
        encoded = {file: structure for file, structure in files.items() if structure is not None}
        require_packages(path, encoded.values())
        with rewriting(path):
            for file, structure in encoded.items():
                entries[file.name], rounding = restore_file(file, structure)
                if rounding:
                    roundings[file.name] = add_rounding(roundings.get(file.name, {}), rounding)
            fields = listing.manifest_fields()
            weights_name = fields["metadata"].pop(_WAS_SAFETENSORS, None)
            if weights_name in (WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME) and (path / weights_name).is_file():
                name = to_safetensors(path / weights_name)
                roundings |= {name: roundings.pop(weights_name)} if weights_name in roundings else {}
                entries.pop(weights_name, None)
            manifest = Manifest(entries, PLAIN_MODE, rounded_before=roundings, **fields)
            return listing.write_manifest(manifest, carries_rounding=False)


class Inventory:
    """The files of a checkpoint directory that hold training state.

    `weight_files` begins with the file that loaders open first, and has indices before their shards. All are of one
    kind, of an adapter or of a model. ConfigError: there is no checkpoint. UnsupportedError: the checkpoint is sharded,
    but not written by DCP: it is FSDP's with LOCAL_STATE_DICT, or the directory of a run of DeepSpeed.
    """

    def __init__(self, path: Path):
        self.path = path
        torch_files = sorted(file for file in path.iterdir() if is_torch_file(file)) if path.is_dir() else []
        self.weight_files = weight_files(path)
        self.other_files = [file for file in torch_files if file not in self.weight_files]
        if not (self.weight_files or torch_files):
            content = "a directory without any" if path.is_dir() else "no directory"
            next_step = "Pass one checkpoint, e.g. out/checkpoint-500, not the run."
            raise ConfigError(str(path), "a directory with weights or other torch files", content, next_step)
        for pattern in _SHARDED_STATE:
            for file in path.glob(pattern):
                next_step = "Leave it as it is, or have the Trainer save a full one, or with FSDP's SHARDED_STATE_DICT."
                raise UnsupportedError(str(path), "a checkpoint in whole files", file.name, next_step)

    def require_training_state(self) -> None:
        """Check that there is training state; ConfigError: these are the files of a finished model."""
        state_files = [file for file in self.other_files if file.name != "training_args.bin"]
        is_model = any((self.path / name).is_file() for name in _MODEL_CONFIGS)
        if is_model and not (state_files or any((self.path / name).is_file() for name in PROGRESS_NAMES)):
            next_step = (
                "To store its weights as a checkpoint's all the same, which from_pretrained reads with hf_trainweights "
                "alone, pass weights_only=True, on the command line --weights-only."
            )
            files = f"a model ({self.weight_files[0].name}) and no training state" if self.weight_files else "no state"
            raise ConfigError(str(self.path), "a training checkpoint", files, next_step)

    def replaced_by(self, weights_name: str) -> list[Path]:
        """List the files to remove once a new weights file is there: other weight files, and recorded digests."""
        # The digests of a quantized model's weight files; the manifest has those of the new file.
        return [file for file in self.weight_files if file.name != weights_name] + digest_files(self.path)


def load_if_possible(path: Path) -> Any:
    """Load a torch file as `load_file` does, mapped and on the CPU; None if it is another file or holds more.

    In a plain file stand-ins take the place of the objects that encoded files may hold, too.
    """
    try:
        with torch.serialization.safe_globals(stand_ins()):
            return load_file(path, mmap=True)
    except CorruptFileError:
        return None


class OptimizerFile:
    """The file of the optimizer's state, loaded and planned before any file changes. The newer one, if there are two.

    `name` is None if there is no such file. `tree` is its content, None if it holds more than plain data. `state` is
    the tree if that is an optimizer's state dict, else empty. `names` are those of parameters by their index in the
    state, by default as recorded there. ConfigError: a rule selects optimizer states by name, and there are no names.
    """

    def __init__(self, path: Path, policy: Policy, names: Mapping[Any, str], class_name: str | None = None):
        files = [path / name for name in OPTIMIZER_NAMES if (path / name).exists()]
        file = newest(files, load_if_possible) if files else None
        self.name = file.name if file else None
        self.tree = load_if_possible(file) if file else None
        self.state: Mapping[str, Any] = self.tree if is_optimizer_state(self.tree) else {}
        self.names = names or (recorded_names(self.state) if self.state else {})
        self.class_name = class_name
        self.plan = policy.plan_tree(self.tree, self.names, class_name)


def _weights_to_store(
    job: RewriteJob, inventory: Inventory, listing: Listing, optimizer: OptimizerFile
) -> Weights | None:
    """Read the weights to encode; None if there are none, or if they stay, because encoding them again would lose more.

    Buffers are by default those that were recorded, else see `find_buffers`. ConfigError: a rule fits no tensor.
    """
    path = inventory.path
    if job.keep_weights or not inventory.weight_files:
        return None
    if problem := converted_weights_problem(path) or _unnamed_weights_problem(inventory):
        warnings.warn(f"{path}: the weights stay as they are: {problem}", stacklevel=3)
        return None
    files = [file for file in inventory.weight_files if file.name in ENTRY_POINTS]
    is_adapter, twin = files[0].name.startswith("adapter"), path / FSDP_WEIGHTS_NAME
    if twin.exists() and not is_adapter:
        files.insert(0, twin)
    # The newest plain file is used if there is one, because encoded files are made from plain ones.
    plain_files = [file for file in files if listing.structure(file) is None]
    source = newest(plain_files or files, read_weights)
    if is_lossy(listing.structure(source)):
        return None
    file_name = ADAPTER_WEIGHTS_NAME if is_adapter else WEIGHTS_NAME
    state = {job.renamed.get(name, name): tensor for name, tensor in read_weights(source).items()}
    job.policy.require_used([*map(str, state), *optimizer.names.values()])
    buffers = _recorded_buffers(path, listing.previous, file_name) if job.buffers is None else job.buffers
    buffers = find_buffers(state, optimizer.state) if buffers is None else buffers
    return Weights(state, buffers, optimizer.state, optimizer.names, optimizer.class_name, file_name)


def _unnamed_weights_problem(inventory: Inventory) -> str | None:
    """Return why accelerate could not load the weights of its `save_state` from another file, or None if it could.

    Its safetensors file has only one name of a tied weight. From a file of another kind it expects all names.
    """
    is_accelerates = any(inventory.path.glob(_ACCELERATE_STATE)) and not (inventory.path / TRAINER_STATE_NAME).exists()
    file = inventory.weight_files[0]
    if not is_accelerates or file.suffix != ".safetensors":
        return None
    return f"accelerate loads tied weights from {file.name} alone; save_state(safe_serialization=False) names them all"


def newest(files: Sequence[Path], read: Callable[[Path], Any]) -> Path:
    """Return the newest of several files for the same state of a checkpoint, as two runs in one directory leave them.

    CorruptFileError: the newest files have the same time, and `read` returns different content for them.
    """
    times = [file.stat().st_mtime_ns for file in files]
    first, *others = (file for file, time in zip(files, times, strict=True) if time == max(times))
    for other in others:
        if not first.samefile(other) and not _agree(read(first), read(other)):
            conflict = f"another one in {other.name}, of the same time"
            next_step = "One of them is of an earlier run: remove that one."
            raise CorruptFileError(str(first), "the only state of its kind", conflict, next_step)
    return first


def _agree(one: Any, other: Any) -> bool:
    """Return whether two states have the same values, ignoring keys that only one dict has, such as tied weights."""
    if isinstance(one, dict) and isinstance(other, dict):
        shared = one.keys() & other.keys()
        return bool(shared) == bool(one or other) and all(_agree(one[key], other[key]) for key in shared)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_agree, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _recorded_buffers(path: Path, previous: Manifest | None, file_name: str) -> set[str] | None:
    """Return the names of buffers from a plain loop's checkpoint or from the manifest; None if neither has them."""
    if (path / STATE_NAME).is_file():
        state = load_file(path / STATE_NAME)
        names = state.get("names") if isinstance(state, dict) else None
        buffers = names.get("buffers", []) if isinstance(names, dict) else []
        return {name for name in buffers if isinstance(name, str)} if isinstance(buffers, list) else None
    entry = previous.files.get(file_name) if previous else None
    tensors = entry.report.get("tensors", ()) if entry else ()
    return {tensor["name"] for tensor in tensors if tensor["role"] == "buffer"} if tensors else None


def _compress_weights(
    job: RewriteJob, inventory: Inventory, previous: Manifest | None, weights: Weights | None
) -> tuple[dict[str, FileEntry], dict[str, Any]]:
    """Replace the weight files by encoded ones; return the entries of the new files and fields of the manifest."""
    if weights is None:
        return {}, {"anchor": previous and previous.anchor, "base": previous and previous.base}
    entries, anchor = save_weights(job, weights)
    twin = job.path / FSDP_WEIGHTS_NAME
    if weights.file_name == WEIGHTS_NAME and twin.exists():
        replace_by_link(job.path / WEIGHTS_NAME, twin)
        entries[twin.name] = entries[WEIGHTS_NAME]
    remove_files(inventory.replaced_by(weights.file_name))
    return entries, anchor


def _compress_others(
    job: RewriteJob, inventory: Inventory, listing: Listing, optimizer: OptimizerFile, done: Collection[str]
) -> dict[str, FileEntry]:
    """Encode the files that hold no weights, except small ones and those that were rounded already."""
    entries = {}
    for file in inventory.other_files:
        is_optimizer = file.name in OPTIMIZER_NAMES
        is_worth_it = is_optimizer or file.stat().st_size >= SMALL_BYTES
        if file.name in done or not is_worth_it or is_lossy(listing.structure(file)):
            continue
        problem = None
        tree = optimizer.tree if is_optimizer else load_if_possible(file)
        if is_optimizer and file.name != optimizer.name:
            problem = f"it is no newer than {optimizer.name}"
        elif tree is None:
            problem = "it holds more than plain data"
        else:
            plan = optimizer.plan if is_optimizer else job.policy.plan_tree(tree)
            try:
                entries[file.name] = save_tree(job, file.name, tree, plan)
            except UnstorableError as error:
                problem = str(error)
        if problem:
            warnings.warn(f"{file} stays as it is: {problem}", stacklevel=3)
    return entries


def replace_weights(path: Path, weights: Mapping[str, Any]) -> None:
    """Replace a checkpoint's weight files by a plain file of these weights, as fast as torch.save writes it.

    `weights` have the module's names, from which a Trainer resumes exactly; its own files may use other names. After an
    error the old weights are there, or the new ones.
    """
    inventory = Inventory(path)
    with rewriting(path):
        replaced = inventory.replaced_by(WEIGHTS_NAME)
        with replace_file(path / WEIGHTS_NAME, replaced) as file:
            torch.save(dict(weights), file)
        remove_files(replaced)
