"""The optimizer and the weights of a checkpoint directory that is to be stored anew, each read once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.encoded.plan import Plan
from hf_trainweights.checkpoint.encoded.reader import is_encoded, load_file, read_structure
from hf_trainweights.checkpoint.manifest.manifest import Manifest
from hf_trainweights.checkpoint.planning.optimizer_layout import is_optimizer_state, recorded_names
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.planning.tree_plan import plan_tree
from hf_trainweights.checkpoint.run.completeness import STATE_NAME
from hf_trainweights.checkpoint.whole.buffers import find_buffers
from hf_trainweights.checkpoint.whole.inventory import Inventory
from hf_trainweights.checkpoint.whole.plain_weights import load_if_possible, read_weights
from hf_trainweights.checkpoint.whole.weights_encoder import WEIGHTS_NAME, Weights
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.torch_zip import is_torch_file
from hf_trainweights.files.weight_files import ENTRY_POINTS

OPTIMIZER_NAME = "optimizer.pt"
# What a Trainer writes under FSDP with FULL_STATE_DICT, and resumes from: the same state that other files hold.
FSDP_OPTIMIZER_NAME = "optimizer.bin"
FSDP_WEIGHTS_NAME = "pytorch_model_fsdp.bin"

OPTIMIZER_NAMES = (OPTIMIZER_NAME, FSDP_OPTIMIZER_NAME)

ADAPTER_WEIGHTS_NAME = "adapter_model.bin"


@dataclass(frozen=True)
class OptimizerFile:
    """The optimizer's file, loaded and planned once, before anything changes: a rule that needs names fails here.

    Args:
        name: Its name; of two files the newer one's, whose state counts. None if there is none.
        tree: What it holds; None if it is not there, or holds more than plain data.
        plan: How to encode it.
        names: Names of the optimizer's parameters by their index.
    """

    name: str | None
    tree: Any
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
        names = names or (recorded_names(tree) if is_optimizer_state(tree) else {})
        return cls(file and file.name, tree, plan_tree(tree, policy, names), names)

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state dict; empty if the file holds another layout."""
        return self.tree if is_optimizer_state(self.tree) else {}


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
