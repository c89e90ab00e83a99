"""An existing checkpoint directory made small where it is, and plain again, one atomic file at a time.

What it holds is listed, and each part read once, before anything in it changes. The manifest goes first and comes back
last, so between the two the directory is a plain one: at every moment each file is whole, old or new, and Transformers
loads it. A weights file is written before the ones it replaces go, because loaders prefer those: `model.safetensors`,
the index of shards, the shards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.encoded.reader import is_encoded, load_file, read_structure
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
    anchor_problem,
    converted_weights_problem,
    entry_points,
    intact_manifest,
    require_undamaged,
    weights_problem,
)
from hf_trainweights.checkpoint.run.job import SaveJob, manifest_fields, rewriting, write_complete_manifest
from hf_trainweights.checkpoint.whole.plain_files import restore_file, to_safetensors
from hf_trainweights.checkpoint.whole.writer import WEIGHTS_NAME, Weights, recorded_states, save_tree, save_weights
from hf_trainweights.errors import ConfigError, CorruptFileError, UnstorableError, UnsupportedError
from hf_trainweights.files.atomic import freeing_in_background, remove_files, replace_by_link, replace_file
from hf_trainweights.files.digests import digest_files
from hf_trainweights.files.reading import is_torch_file, require_regular_file
from hf_trainweights.files.weight_files import ENTRY_POINTS, safetensors_files, shard_names

ADAPTER_WEIGHTS_NAME = "adapter_model.bin"

_SHARDED_STATE = ("pytorch_model_fsdp_*", "optimizer_*[0-9]", "global_step*", "*.distcp", "zero_to_fp32.py")
# Files that accelerate's save_state writes beside weights, and a Trainer does not.
_ACCELERATE_STATE = "random_states_*.pkl"
_MODEL_CONFIGS = ("config.json", "adapter_config.json")

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
        return None if entry_points(self.path) else "no weight file is there"

    def problem(self) -> str | None:
        """Say why a resume could not read the files, as far as checksums and anchors show, or return None."""
        others = [self.path / name for name in RESUMED_FROM if (self.path / name).exists()]
        files = [*entry_points(self.path)[:1], *others]
        problems = (check(file) for check in (weights_problem, anchor_problem) for file in files)
        return self.missing_problem() or next(filter(None, problems), None)

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
        path, inventory = self.path, Inventory(self.path)
        if not job.weights_only:
            inventory.require_training_state()
        previous = intact_manifest(path)
        # With the same choices a second call finds nothing left to do.
        recorded: dict[str, Any] = {"policy": job.policy.to_dict(), "keep_weights": job.keep_weights}
        if job.base is not None:
            recorded["anchor"] = [str(job.base.path), job.base.keep]
        if previous and job.is_done(previous, recorded):
            return previous
        require_undamaged(path, previous.files if previous else ())
        optimizer = OptimizerFile(path, job.policy, job.optimizer_names, job.class_after(previous))
        weights = _weights_to_store(job, inventory, previous, optimizer)
        with rewriting(path):
            entries, fields = _compress_weights(job, inventory, previous, weights)
            entries |= _compress_others(job, inventory, optimizer, done=entries)
            if optimizer.name in entries:
                recorded |= recorded_states(job, optimizer.class_name, entries[optimizer.name])
            fields |= manifest_fields(path, previous, job.metrics, recorded)
            had_safetensors = any(file.suffix == ".safetensors" for file in inventory.weight_files)
            if job.weights_only and weights is not None and had_safetensors:
                fields["metadata"][_WAS_SAFETENSORS] = weights.file_name
            return write_complete_manifest(path, previous, Manifest(entries, job.policy.mode, **fields))

    def restore(self) -> Manifest:
        """Turn the files back into plain ones that torch.load reads without this package."""
        path, inventory = self.path, Inventory(self.path)
        previous = intact_manifest(path)
        require_undamaged(path, previous.files if previous else ())
        lost = dict(previous.rounded_before) if previous else {}
        with rewriting(path):
            for file in filter(is_torch_file, sorted([*inventory.weight_files, *inventory.other_files])):
                if is_encoded(file) and (rounding := restore_file(file)):
                    lost[file.name] = add_rounding(lost.get(file.name, {}), rounding)
            fields = manifest_fields(path, previous)
            weights_name = fields["metadata"].pop(_WAS_SAFETENSORS, None)
            if weights_name in (WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME) and (path / weights_name).is_file():
                name = to_safetensors(path / weights_name)
                lost |= {name: lost.pop(weights_name)} if weights_name in lost else {}
            return write_complete_manifest(path, None, Manifest({}, PLAIN_MODE, rounded_before=lost, **fields))


class Inventory:
    """The files of a checkpoint directory that hold training state.

    `weight_files` are of one family, the one that loaders open first at the head, indices before their shards.
    ConfigError: there is no checkpoint. UnsupportedError: a sharded one that no DCP wrote, of DeepSpeed or of FSDP with
    LOCAL_STATE_DICT.
    """

    def __init__(self, path: Path):
        self.path = path
        torch_files = sorted(file for file in path.iterdir() if is_torch_file(file)) if path.is_dir() else []
        self.weight_files = weight_files(path)
        self.other_files = [file for file in torch_files if file not in self.weight_files]
        if not (self.weight_files or torch_files):
            found = "a directory without any" if path.is_dir() else "no directory"
            next_step = "Pass one checkpoint, e.g. out/checkpoint-500, not the run."
            raise ConfigError(str(path), "a directory with weights or other torch files", found, next_step)
        for pattern in _SHARDED_STATE:
            for file in path.glob(pattern):
                next_step = "Leave it as it is, or have the Trainer save a full one, or with FSDP's SHARDED_STATE_DICT."
                raise UnsupportedError(str(path), "a checkpoint in whole files", file.name, next_step)

    def require_training_state(self) -> None:
        """Check that these are not the files of a finished model; ConfigError: there is nothing that a resume needs."""
        state_files = [file for file in self.other_files if file.name != "training_args.bin"]
        is_model = any((self.path / name).is_file() for name in _MODEL_CONFIGS)
        if is_model and not (state_files or any((self.path / name).is_file() for name in PROGRESS_NAMES)):
            next_step = (
                "To store its weights as a checkpoint's all the same, which from_pretrained reads with hf_trainweights "
                "alone, pass weights_only=True, on the command line --weights-only."
            )
            found = f"a model ({self.weight_files[0].name}) and no training state" if self.weight_files else "no state"
            raise ConfigError(str(self.path), "a training checkpoint", found, next_step)

    def replaced_by(self, weights_name: str) -> list[Path]:
        """List the files that a new weights file makes wrong or idle."""
        # Digests of a quantized model's weight files go with these; the manifest has those of the new ones.
        return [file for file in self.weight_files if file.name != weights_name] + digest_files(self.path)


def weight_files(path: Path) -> list[Path]:
    """List weight files of one family, the one that loaders open first at the head, indices before their shards.

    CorruptFileError: an index cannot be read.
    """
    present = [name for name in ENTRY_POINTS if (path / name).is_file()]
    family = [name for name in present if name.startswith("adapter") == present[0].startswith("adapter")]
    files = [path / name for name in family]
    for index in [file for file in files if file.name.endswith(".index.json")]:
        files += [path / shard for shard in shard_names(index) if (path / shard).is_file()]
    return files


def load_if_possible(path: Path) -> Any:
    """Load a torch file as `load_file` does, mapped and on the CPU; None if it holds more than data, or is none."""
    try:
        return load_file(path, mmap=True)
    except CorruptFileError:
        return None


def read_weights(path: Path) -> dict[str, Any]:
    """Return the state dict in a weight file, or in the shards of an index, on the CPU, mapped where it can be."""
    next_step = "Use another checkpoint, or restore this one from a copy."
    if path.name.endswith(".index.json"):
        shards = [read_weights(path.parent / name) for name in shard_names(path)]
        return {name: tensor for shard in shards for name, tensor in shard.items()}
    if path.suffix == ".safetensors":
        require_regular_file(path)
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
                # safetensors keeps a shared tensor once, and notes which name its other names stand for.
                shared = {name: other for name, other in (file.metadata() or {}).items() if other in tensors}
                return tensors | {name: tensors[other] for name, other in shared.items()}
        except SafetensorError as error:
            raise CorruptFileError(str(path), "readable weights", str(error)[:300], next_step) from error
    state = load_file(path, mmap=True)
    if not isinstance(state, dict):
        raise CorruptFileError(str(path), "a state dict", type(state).__name__, next_step)
    return state


class OptimizerFile:
    """The optimizer's file, loaded and planned once, before anything changes: a rule that needs names fails here.

    Of two files it is the newer one. `name` is None if there is none, `tree` also if it holds more than plain data.
    `state` is the tree as an optimizer's state dict, empty if it has another layout; `names` are those of parameters by
    their index in it, by default those that it records. ConfigError: a rule selects optimizer states by name, and there
    are no names.
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
    job: SaveJob, inventory: Inventory, previous: Manifest | None, optimizer: OptimizerFile
) -> Weights | None:
    """Read the weights of a checkpoint; None where there are none, or they stay: encoding them again would lose more.

    Buffers are by default those that were recorded, else see `find_buffers`. ConfigError: a rule names nothing there.
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
    # Of the plain ones the newest counts, because an encoded one was made of one.
    plain = [file for file in files if not (is_torch_file(file) and is_encoded(file))]
    source = newest(plain or files, read_weights)
    if is_lossy(source):
        return None
    file_name = ADAPTER_WEIGHTS_NAME if is_adapter else WEIGHTS_NAME
    state = {job.renamed.get(name, name): tensor for name, tensor in read_weights(source).items()}
    job.policy.require_used([*map(str, state), *optimizer.names.values()])
    buffers = _recorded_buffers(path, previous, file_name) if job.buffers is None else job.buffers
    buffers = find_buffers(state, optimizer.state) if buffers is None else buffers
    return Weights(state, buffers, optimizer.state, optimizer.names, optimizer.class_name, file_name)


def _unnamed_weights_problem(inventory: Inventory) -> str | None:
    """Say that accelerate could not load the weights of its `save_state` from another file, or return None.

    A safetensors file of it has no name of a tied weight but one, and from another file it wants all of them.
    """
    is_accelerates = any(inventory.path.glob(_ACCELERATE_STATE)) and not (inventory.path / TRAINER_STATE_NAME).exists()
    file = inventory.weight_files[0]
    if not is_accelerates or file.suffix != ".safetensors":
        return None
    return f"accelerate loads tied weights from {file.name} alone; save_state(safe_serialization=False) names them all"


def newest(files: Sequence[Path], read: Callable[[Path], Any]) -> Path:
    """Return the newest of several files that hold the same part of a checkpoint, as two runs may leave them.

    CorruptFileError: the newest are of the same time, and what `read` returns of them differs.
    """
    times = [file.stat().st_mtime_ns for file in files]
    first, *others = (file for file, time in zip(files, times, strict=True) if time == max(times))
    for other in others:
        if not first.samefile(other) and not _agree(read(first), read(other)):
            found = f"another one in {other.name}, of the same time"
            next_step = "One of them is of an earlier run: remove that one."
            raise CorruptFileError(str(first), "the only state of its kind", found, next_step)
    return first


def _agree(one: Any, other: Any) -> bool:
    """Return whether two states have the same values; what one dict lacks, such as a tied weight, says nothing."""
    if isinstance(one, dict) and isinstance(other, dict):
        shared = one.keys() & other.keys()
        return bool(shared) == bool(one or other) and all(_agree(one[key], other[key]) for key in shared)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_agree, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _recorded_buffers(path: Path, previous: Manifest | None, file_name: str) -> set[str] | None:
    """Return the buffers that a plain loop's checkpoint names, or the manifest; None where neither knows."""
    if (path / STATE_NAME).is_file():
        state = load_file(path / STATE_NAME)
        names = state.get("names") if isinstance(state, dict) else None
        buffers = names.get("buffers", []) if isinstance(names, dict) else []
        return {name for name in buffers if isinstance(name, str)} if isinstance(buffers, list) else None
    entry = previous.files.get(file_name) if previous else None
    tensors = entry.report.get("tensors", ()) if entry else ()
    return {tensor["name"] for tensor in tensors if tensor["role"] == "buffer"} if tensors else None


def is_lossy(path: Path) -> bool:
    """Return whether a file was encoded with a loss: encoding it once more would add to its error, or hide it."""
    storages = read_structure(path)["storages"] if is_torch_file(path) and is_encoded(path) else ()
    # What is rounded and then stored losslessly has a bound, too.
    return any("bound" in storage or not CODECS[storage["codec"]].lossless for storage in storages)


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
    """Put weights in the place of a checkpoint's weight files, plain and as fast as torch.save writes them.

    A Trainer resumes exactly from the module's names, and its own files may have others. After an error the old weights
    are there, or the new ones.
    """
    inventory = Inventory(path)
    with rewriting(path):
        replaced = inventory.replaced_by(WEIGHTS_NAME)
        with replace_file(path / WEIGHTS_NAME, replaced) as file:
            torch.save(dict(weights), file)
        remove_files(replaced)
