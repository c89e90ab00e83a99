"""The optimizer and the weights of a checkpoint directory that is to be stored anew, each read once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.directory.buffers import find_buffers
from hf_trainweights.checkpoint.directory.completeness import STATE_NAME
from hf_trainweights.checkpoint.directory.inventory import Inventory, is_torch_file
from hf_trainweights.checkpoint.directory.manifest import Manifest
from hf_trainweights.checkpoint.directory.plain_weights import load_if_possible, read_weights
from hf_trainweights.checkpoint.directory.weights_encoder import WEIGHTS_NAME, Weights
from hf_trainweights.checkpoint.encoded.plan import Plan
from hf_trainweights.checkpoint.encoded.reader import is_encoded, load_file, read_structure
from hf_trainweights.checkpoint.planning.optimizer_layout import is_optimizer_state, recorded_names
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.planning.tree_plan import plan_tree

OPTIMIZER_NAME = "optimizer.pt"
# What a Trainer writes under FSDP with FULL_STATE_DICT, and resumes from: the same state that other files hold.
FSDP_OPTIMIZER_NAME = "optimizer.bin"
FSDP_WEIGHTS_NAME = "pytorch_model_fsdp.bin"

OPTIMIZER_NAMES = (OPTIMIZER_NAME, FSDP_OPTIMIZER_NAME)

_ADAPTER_NAME = "adapter_model.bin"


@dataclass(frozen=True)
class OptimizerFile:
    """The optimizer's file, loaded and planned once, before anything changes: a rule that needs names fails here.

    Args:
        tree: What it holds; None if it is not there, or holds more than plain data.
        plan: How to encode it.
        names: Names of the optimizer's parameters by their index.
    """

    tree: Any
    plan: Plan
    names: Mapping[Any, str]

    @classmethod
    def read(cls, path: Path, policy: Policy, names: Mapping[Any, str]) -> OptimizerFile:
        """Load and plan the file of a checkpoint directory.

        Args:
            path: The directory.
            policy: Which codec for which tensor.
            names: Names of the optimizer's parameters by their index. Default: those that the file records.

        Raises:
            ConfigError: A rule selects optimizer states by name, and there are no names.
            MissingAnchorError: The file was moved without the anchor that it needs.
        """
        file = next((path / name for name in OPTIMIZER_NAMES if (path / name).exists()), path / OPTIMIZER_NAME)
        tree = load_if_possible(file) if file.exists() else None
        names = names or (recorded_names(tree) if is_optimizer_state(tree) else {})
        return cls(tree, plan_tree(tree, policy, names), names)

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
    """Read the weights of a checkpoint.

    Args:
        inventory: Its files.
        policy: Which codec for which tensor.
        previous: Its manifest, which may know its buffers.
        buffers: Names of weights that are buffers. Default: as recorded, else see `find_buffers`.
        optimizer: Its optimizer.

    Returns:
        The weights; None where there are none, or where encoding them again would lose more.

    Raises:
        ConfigError: A rule names nothing in the checkpoint.
        CorruptFileError: They cannot be read.
        MissingAnchorError: They were moved without the anchor that they need.
    """
    if not inventory.weight_files or is_lossy(inventory.weight_files[0]):
        return None
    first = inventory.weight_files[0]
    file_name = _ADAPTER_NAME if first.name.startswith("adapter") else WEIGHTS_NAME
    twin = inventory.path / FSDP_WEIGHTS_NAME
    state = read_weights(twin if file_name == WEIGHTS_NAME and twin.exists() else first)
    policy.require_used([*map(str, state), *optimizer.names.values()])
    buffers = _recorded_buffers(inventory.path, previous, file_name) if buffers is None else buffers
    buffers = find_buffers(state, optimizer.state) if buffers is None else buffers
    return Weights(state, buffers, optimizer.state, optimizer.names, file_name)


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
    """Return whether a file was encoded with a loss: encoding it once more would add to its error, or hide it.

    Raises:
        CorruptFileError: It is an encoded file, and damaged.
    """
    if not is_torch_file(path) or not is_encoded(path):
        return False
    # What is rounded and then stored losslessly has a bound, too.
    storages = read_structure(path)["storages"]
    return any("bound" in storage or not CODECS[storage["codec"]].lossless for storage in storages)
