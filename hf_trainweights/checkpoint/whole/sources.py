"""What a checkpoint directory in whole files holds: listed, and each part read once, before anything in it changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.encoded.reader import is_encoded, load_file, read_structure
from hf_trainweights.checkpoint.encoded.storage_tasks import Plan
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME, Manifest
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.planning.roles import find_buffers, is_optimizer_state, recorded_names
from hf_trainweights.checkpoint.run.verification import STATE_NAME, TRAINER_STATE_NAME
from hf_trainweights.checkpoint.whole.writer import WEIGHTS_NAME, Weights
from hf_trainweights.errors import ConfigError, CorruptFileError, UnsupportedError
from hf_trainweights.files.digests import digest_files
from hf_trainweights.files.reading import is_torch_file, require_regular_file
from hf_trainweights.files.weight_files import ENTRY_POINTS, shard_names

OPTIMIZER_NAME = "optimizer.pt"
# What a Trainer writes under FSDP with FULL_STATE_DICT, and resumes from: the same state that other files hold.
FSDP_OPTIMIZER_NAME = "optimizer.bin"
FSDP_WEIGHTS_NAME = "pytorch_model_fsdp.bin"

OPTIMIZER_NAMES = (OPTIMIZER_NAME, FSDP_OPTIMIZER_NAME)

ADAPTER_WEIGHTS_NAME = "adapter_model.bin"

_SHARDED_STATE = ("pytorch_model_fsdp_*", "optimizer_*[0-9]", "global_step*", "*.distcp", "zero_to_fp32.py")

_MODEL_CONFIGS = ("config.json", "adapter_config.json")
_PROGRESS_NAMES = (STATE_NAME, TRAINER_STATE_NAME, MANIFEST_NAME)


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


def read_weights(first: Path) -> dict[str, Any]:
    """Return the state dict in a weight file, or in the shards of an index, on the CPU, mapped where it can be."""
    state: dict[str, Any] = {}
    for name in shard_names(first) if first.name.endswith(".index.json") else [first.name]:
        state |= _read_weight_file(first.parent / name)
    return state


def load_if_possible(path: Path) -> Any:
    """Load a torch file as `load_file` does, mapped and on the CPU; None if it holds more than data, or is none."""
    try:
        return load_file(path, mmap=True)
    except CorruptFileError:
        return None


def _read_weight_file(path: Path) -> dict[str, Any]:
    next_step = "Use another checkpoint, or restore this one from a copy."
    if path.suffix == ".safetensors":
        require_regular_file(path)
        try:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        except SafetensorError as error:
            raise CorruptFileError(str(path), "readable weights", str(error)[:300], next_step) from error
    state = load_file(path, mmap=True)
    if not isinstance(state, dict):
        raise CorruptFileError(str(path), "a state dict", type(state).__name__, next_step)
    return state


@dataclass(frozen=True)
class Inventory:
    """The files of a checkpoint directory that hold training state.

    `weight_files` are of one family, the one that loaders open first at the head, indices before their shards.
    """

    path: Path
    weight_files: tuple[Path, ...]
    other_files: tuple[Path, ...]

    def require_training_state(self) -> None:
        """Check that these are not the files of a finished model; ConfigError: there is nothing that a resume needs."""
        state_files = [file for file in self.other_files if file.name != "training_args.bin"]
        is_model = any((self.path / name).is_file() for name in _MODEL_CONFIGS)
        if is_model and not (state_files or any((self.path / name).is_file() for name in _PROGRESS_NAMES)):
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


def take_inventory(path: Path) -> Inventory:
    """List the files of a checkpoint directory; ConfigError: there is no checkpoint.

    UnsupportedError: a sharded one that no DCP wrote, of DeepSpeed or of FSDP with LOCAL_STATE_DICT.
    """
    weights = weight_files(path) if path.is_dir() else []
    torch_files = sorted(file for file in path.iterdir() if is_torch_file(file)) if path.is_dir() else []
    if not (weights or torch_files):
        found = "a directory without any" if path.is_dir() else "no directory"
        next_step = "Pass one checkpoint, e.g. out/checkpoint-500, not the run."
        raise ConfigError(str(path), "a directory with weights or other torch files", found, next_step)
    for pattern in _SHARDED_STATE:
        found = next(path.glob(pattern), None)
        if found is not None:
            next_step = "Leave it as it is, or have the Trainer save a full one, or with FSDP's SHARDED_STATE_DICT."
            raise UnsupportedError(str(path), "a checkpoint in whole files", found.name, next_step)
    return Inventory(path, tuple(weights), tuple(file for file in torch_files if file not in weights))


@dataclass(frozen=True)
class OptimizerFile:
    """The optimizer's file, loaded and planned once, before anything changes: a rule that needs names fails here.

    Of two files it is the newer one. `name` is None if there is none, `tree` also if it holds more than plain data.
    `state` is the tree as an optimizer's state dict, empty if it has another layout; `names` are those of parameters by
    their index in it.
    """

    name: str | None
    tree: Any
    state: Mapping[str, Any]
    plan: Plan
    names: Mapping[Any, str]

    @classmethod
    def read(cls, path: Path, policy: Policy, names: Mapping[Any, str]) -> OptimizerFile:
        """Load and plan the file of a directory; parameters' names by index are by default those that it records.

        ConfigError: a rule selects optimizer states by name, and there are no names.
        """
        files = [path / name for name in OPTIMIZER_NAMES if (path / name).exists()]
        file = newest(files, load_if_possible) if files else None
        tree = load_if_possible(file) if file else None
        state = tree if is_optimizer_state(tree) else {}
        names = names or (recorded_names(state) if state else {})
        return cls(file and file.name, tree, state, policy.plan_tree(tree, names), names)


def weights_to_store(
    inventory: Inventory,
    policy: Policy,
    previous: Manifest | None,
    buffers: Collection[str] | None,
    optimizer: OptimizerFile,
) -> Weights | None:
    """Read the weights of a checkpoint; None where there are none, or where encoding them again would lose more.

    `buffers` are by default those that were recorded, else see `find_buffers`. ConfigError: a rule names nothing there.
    """
    if not inventory.weight_files:
        return None
    is_adapter = inventory.weight_files[0].name.startswith("adapter")
    source = _source_of_weights(inventory, [] if is_adapter else [inventory.path / FSDP_WEIGHTS_NAME])
    if is_lossy(source):
        return None
    file_name = ADAPTER_WEIGHTS_NAME if is_adapter else WEIGHTS_NAME
    state = read_weights(source)
    policy.require_used([*map(str, state), *optimizer.names.values()])
    buffers = _recorded_buffers(inventory.path, previous, file_name) if buffers is None else buffers
    buffers = find_buffers(state, optimizer.state) if buffers is None else buffers
    return Weights(state, buffers, optimizer.state, optimizer.names, file_name)


def _source_of_weights(inventory: Inventory, twins: Sequence[Path]) -> Path:
    """Return the file whose weights count: of the plain ones the newest, because an encoded one was made of one."""
    files = [file for file in twins if file.exists()]
    files += [file for file in inventory.weight_files if file.name in ENTRY_POINTS]
    return newest([file for file in files if not (is_torch_file(file) and is_encoded(file))] or files, read_weights)


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
        return _named_buffers(path / STATE_NAME)
    entry = previous.files.get(file_name) if previous else None
    tensors = entry.report.get("tensors", ()) if entry else ()
    return {tensor["name"] for tensor in tensors if tensor["role"] == "buffer"} if tensors else None


def _named_buffers(path: Path) -> set[str] | None:
    state = load_file(path)
    names = state.get("names") if isinstance(state, dict) else None
    buffers = names.get("buffers", []) if isinstance(names, dict) else []
    return {name for name in buffers if isinstance(name, str)} if isinstance(buffers, list) else None


def is_lossy(path: Path) -> bool:
    """Return whether a file was encoded with a loss: encoding it once more would add to its error, or hide it."""
    if not is_torch_file(path) or not is_encoded(path):
        return False
    # What is rounded and then stored losslessly has a bound, too.
    storages = read_structure(path)["storages"]
    return any("bound" in storage or not CODECS[storage["codec"]].lossless for storage in storages)
