"""`TrainWeightsWriter`: saves small checkpoints through torch.distributed.checkpoint.

The coordinator plans a save once for all shards and sends the plan to every rank. A tensor is planned by its unsharded
size. So the same tensors are exact as in a checkpoint of one process, however small their shards are. The steps of the
lossy modes are measured shard by shard.
"""

from __future__ import annotations

import os
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from hf_trainweights.checkpoint.dcp.metadata import METADATA_NAME
from hf_trainweights.checkpoint.encoded.storage_tasks import Plan, TensorPlan
from hf_trainweights.checkpoint.manifest import require_progress
from hf_trainweights.checkpoint.planning.optimizers import ADAM_GROUP, STATES_KEY, class_name, states_entry
from hf_trainweights.checkpoint.planning.policy import LOSSY_MODES, ModeName, Policy
from hf_trainweights.checkpoint.planning.roles import StateName, models, optimizer_states
from hf_trainweights.checkpoint.planning.update_rules import ADAM, OPTIMIZER_ROLES
from hf_trainweights.checkpoint.run.job import ANCHOR_EVERY_SAVES, require_count
from hf_trainweights.checkpoint.sharded.index import (
    ShardedAnchor,
    StoredItem,
    commit,
    file_names,
    find_sharded_anchor,
    free_number,
    name_of,
)
from hf_trainweights.checkpoint.sharded.rank_files import OBJECT_CODEC, write_others, write_weights
from hf_trainweights.checkpoint.sharded.rank_items import RankItems, RankOrders, is_weight, second_of, settled
from hf_trainweights.errors import SaveError, UnsupportedError
from hf_trainweights.files.atomic import make_directories, save_errors

_OUTCOME = "The checkpoint that was there before, if there was one, is whole."


def plan_tensors(
    plans: Sequence[SavePlan],
    policy: Policy,
    buffers: Collection[str] | None,
    other_names: Iterable[str],
    optimizer_class: str | None = None,
    *,
    is_delta: bool,
) -> dict[str, TensorPlan]:
    """Plan all tensors of a save, by their names in the flattened state dict; `plans` has one SavePlan for each rank.

    If `is_delta`, weights may be stored as differences to the run's anchors. If `optimizer_class` is None, states are
    planned as Adam's; later `settled` checks that with the optimizer's groups.
    ConfigError: a rule fits no tensor and none of the `other_names`.
    """
    items = [item for plan in plans for item in plan.items]
    tensors = {
        item.index.fqn: torch.empty(data.size, dtype=data.properties.dtype, device="meta")
        for item in items
        if (data := item.tensor_data) is not None
    }
    states = optimizer_states(item.index.fqn for item in items)
    # DCP's planner makes a name of the keys in nested dicts; these are the keys by name.
    paths = {name: keys for plan in plans for name, keys in (plan.planner_data or {}).items()}
    by_model = models((name for name in tensors if name not in states), paths)
    parameters = {state.parameter for state in states.values()}
    policy.require_used([*other_names, *(name for names in by_model.values() for name in names), *parameters])
    planned: dict[str, TensorPlan] = {}
    for names in by_model.values():
        weights = {name: tensors[stored] for name, stored in names.items()}
        # If no optimizer is saved with the weights, vectors count as buffers.
        trained = weights.keys() & parameters or {name for name, weight in weights.items() if weight.dim() > 1}
        exact = weights.keys() - trained if buffers is None else buffers
        plan = policy.plan_weights(weights, weights if is_delta else (), buffers=exact)
        planned |= {stored: plan[name,] for name, stored in names.items()}
    tensor_states = {name: state for name, state in states.items() if name in tensors}
    return planned | _plan_states(tensor_states, tensors, policy, optimizer_class or ADAM)


def moments_together(plans: Sequence[SavePlan], tensor_plans: Mapping[str, TensorPlan]) -> list[SavePlan]:
    """Move each first moment that is encoded relative to its second moment to the rank that stores the second one.

    If several ranks hold both, DCP may have assigned them to different ranks.
    """
    ranks: dict[object, int] = {item.index: rank for rank, plan in enumerate(plans) for item in plan.items}
    lists: list[list[WriteItem]] = [[] for _ in plans]
    for rank, plan in enumerate(plans):
        for item in plan.items:
            lists[ranks.get(second_of(item, tensor_plans.get(item.index.fqn)), rank)].append(item)
    return [replace(plan, items=items) for plan, items in zip(plans, lists, strict=True)]


def _plan_states(
    states: Mapping[str, StateName], tensors: Mapping[str, Tensor], policy: Policy, optimizer_class: str
) -> dict[str, TensorPlan]:
    trees: dict[str, dict[str, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for name, state in states.items():
        trees[state.optimizer][state.parameter][state.key] = tensors[name]
    plans: dict[str, Plan] = {}
    for optimizer, tree in trees.items():
        groups = [{**ADAM_GROUP, "params": list(tree)}]
        state = {"state": tree, "param_groups": groups}
        plans[optimizer] = policy.plan_optimizer(state, optimizer=optimizer_class)
    return {name: plans[state.optimizer]["state", state.parameter, state.key] for name, state in states.items()}


class TrainWeightsWriter(StorageWriter):
    """Writes small checkpoints for `torch.distributed.checkpoint.save` and `async_save`.

    A stock `FileSystemReader` can read them if hf_trainweights is imported. `TrainWeightsReader` also checks the files
    and executes no pickle. Errors are raised on every rank as DCP's `CheckpointException`, whose `failures` maps
    each rank that failed to its error and traceback: `error.failures[rank][0]` is one of `hf_trainweights.errors`.
    `async_save` encodes in a thread; pass it a process group on the CPU that training does not use.

    Args:
        path: The directory of the checkpoint, which all ranks share. If it holds a checkpoint already, that one stays
            intact until the new one is complete, and is then removed.
        mode: `lossless`, `near-lossless` or `compact`, see `Policy`.
        rules: Exceptions from the mode, see `Policy`. Weights have the names of the model's own state dict.
        anchor: An earlier checkpoint of the run. Weights are stored as differences to the anchor that it names. The new
            checkpoint gets hard links to that anchor, so any other checkpoint may be deleted. The checkpoint is full if
            `anchor` is left out, if a new anchor is due, or if the tensors are sharded differently now.
        buffers: Names of buffers in the model, which are exact in every mode. Default: tensors that have no state in an
            optimizer that is saved with them; if no tensor has a state, those of fewer than two dimensions.
        anchor_every: The most checkpoints that one anchor serves, at least 1.
        step: Training steps done. If all checkpoints of a run give their step, steps of the lossy modes become finer
            when saves follow each other more closely.
        metadata: JSON to keep in the manifest.
        optimizer: The optimizer, or its class by module and name, `"AdamW"` for torch's. The lossy modes round states
            of torch's Adam and AdamW alone. Default: states count as theirs if the groups saved with them have exactly
            their settings, which a subclass with a `step` of its own has, too.
        overwrite: Whether a checkpoint at `path` may be replaced.

    Raises:
        ConfigError: The mode or a rule is unknown, or `anchor_every` or `step` is not a valid number.

    Examples:
        >>> import warnings, torch, torch.distributed.checkpoint as dcp
        >>> warnings.filterwarnings("ignore", "torch.distributed is .*uninitialized")  # one process, and we mean it
        >>> model = {"weight": torch.ones(2, 3)}
        >>> writer = TrainWeightsWriter("checkpoint-1", mode="lossless")
        >>> _ = dcp.save({"model": model}, storage_writer=writer, no_dist=True)
        >>> model["weight"].zero_()
        tensor([[0., 0., 0.],
                [0., 0., 0.]])
        >>> dcp.load({"model": model}, storage_reader=dcp.FileSystemReader("checkpoint-1"), no_dist=True)
        >>> model["weight"]
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: ModeName = "lossless",
        rules: Mapping[str, Any] | None = None,
        *,
        anchor: str | os.PathLike[str] | None = None,
        buffers: Collection[str] | None = None,
        anchor_every: int = ANCHOR_EVERY_SAVES,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        optimizer: Any = None,
        overwrite: bool = True,
    ):
        super().__init__()
        self._path = Path(path).absolute()
        self._policy = Policy(mode, rules or {})
        self._previous = None if anchor is None else Path(anchor).absolute()
        self._buffers = None if buffers is None else frozenset(buffers)
        self._anchor_every = require_count("anchor_every", anchor_every)
        require_progress(step)
        self._fields = {"mode": mode, "step": step, "metadata": dict(metadata or {})}
        self._optimizer_class = class_name(optimizer)
        self._overwrite = overwrite
        self._save_id = str(uuid.uuid4())
        self._at_hand: list[WriteItem] = []
        self._anchor: ShardedAnchor | None = None
        self._is_exact = False
        self._use_collectives = True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save, to the path `checkpoint_id` if given; DCP calls it."""
        if checkpoint_id:
            self._path = Path(checkpoint_id).absolute()
        self._save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Store the settings of a save; DCP calls it on every rank."""
        self._use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check that the save is possible; DCP calls it on every rank.

        Raises:
            UnsupportedError: The save uses no collectives, or the planner caches plans.
            SaveError: The checkpoint that is there may not be replaced, or the directory cannot be made.
        """
        if not self._use_collectives:
            next_step = "Save with collectives: one manifest lists the files of all ranks."
            raise UnsupportedError("use_collectives", "True", "False", next_step)
        if not getattr(plan, "usable", True):
            next_step = "Leave it off: the codecs of a save are part of its plan."
            raise UnsupportedError("enable_plan_caching", "False", "True", next_step)
        if not self._overwrite and (self._path / METADATA_NAME).exists():
            next_step = "Save to another path, or pass overwrite=True."
            raise SaveError(str(self._path), "no checkpoint, because overwrite is False", "one", next_step)
        with save_errors(self._path, _OUTCOME):
            make_directories(self._path)
        self._at_hand = list(plan.items)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan], known: Collection[str] = ()) -> list[SavePlan]:
        """Plan the save; DCP calls it on the coordinator. A rule may also fit one of the `known` names.

        Raises:
            ConfigError: A rule fits no tensor.
            SaveError: The directory cannot be read.
        """
        with save_errors(self._path, _OUTCOME):
            number = free_number(self._path)
        previous = find_sharded_anchor(self._previous, self._fields["step"]) if self._previous else None
        is_due = previous is None or previous.record.is_spent(self._anchor_every)
        plan_all = partial(plan_tensors, plans, self._policy, self._buffers, known, self._optimizer_class)
        tensor_plans = {} if is_due else plan_all(is_delta=True)
        self._anchor = previous if previous and _fits(previous, plans, tensor_plans) else None
        if self._anchor is None:
            tensor_plans = plan_all(is_delta=False)
        self._is_exact = all(plan.is_lossless for plan in tensor_plans.values() if is_weight(plan))
        step_rms = previous.record.step_rms(previous.interval_steps) if previous else {}
        rank_plans = []
        for rank, plan in enumerate(moments_together(plans, tensor_plans)):
            shards = [name_of(item) for item in plan.items if is_weight(tensor_plans.get(item.index.fqn))]
            anchors = self._anchor.files(shards) if self._anchor else {}
            moved = {name: step_rms.get(name) for name in shards} if step_rms else {}
            orders = RankOrders(*file_names(rank, number), tensor_plans, anchors, moved, self._optimizer_class)
            rank_plans.append(replace(plan, storage_data=orders))
        return rank_plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the files of a rank; DCP calls it on every rank.

        Returns:
            A `StoredItem` for each item.

        Raises:
            UnstorableError: A tensor or an object cannot be stored; the error names it.
            SaveError: The disk is full or refuses.
        """
        items = RankItems(self._path, plan.items, planner.resolve_data, plan.storage_data, self._at_hand)
        future: Future[list[WriteResult]] = Future()
        future.set_result(write_items(items))
        self._at_hand = []
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint; DCP calls it on the coordinator.

        Raises:
            ConfigError: `metadata` holds something that cannot be written as JSON.
            UnsupportedError: This version of torch lacks a class that `.metadata` needs.
            SaveError: The disk is full or refuses.
        """
        fields = {**self._fields, "metadata": {**self._fields["metadata"], **self._states(results)}}
        with save_errors(self._path, _OUTCOME):
            commit(self._path, metadata, results, self._save_id, self._anchor, self._is_exact, **fields)

    def _states(self, results: list[list[WriteResult]]) -> dict[str, Any]:
        """Return the manifest's metadata about the optimizer states that the ranks wrote; empty if they wrote none."""
        rows = [item.row for items in results for item in items if isinstance(item, StoredItem)]
        states = [row for row in rows if row["role"] in OPTIMIZER_ROLES and row["codec"] != OBJECT_CODEC]
        is_lossy = self._policy.mode in LOSSY_MODES
        return {STATES_KEY: states_entry(self._optimizer_class, states, is_lossy=is_lossy)} if states else {}

    def storage_meta(self) -> StorageMeta:
        """Return the path of the checkpoint and the identity of the save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The path of the checkpoint."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a checkpoint can be saved there: at a path, not at a URL."""
        return "://" not in str(checkpoint_id)


def write_items(rank: RankItems) -> list[WriteResult]:
    """Write the files of one rank, and return a `StoredItem` for each item."""
    with save_errors(rank.directory, _OUTCOME):
        rank = settled(rank)
        return [*write_weights(rank), *write_others(rank)]


def _fits(anchor: ShardedAnchor, plans: list[SavePlan], tensor_plans: Mapping[str, TensorPlan]) -> bool:
    """Return whether the anchors hold all shards of the weights, and at least one is planned as a difference."""
    weights = [item for plan in plans for item in plan.items if is_weight(tensor_plans.get(item.index.fqn))]
    is_used = any(plan.uses_anchor for plan in tensor_plans.values())
    return is_used and {name_of(item) for item in weights} <= anchor.shards.keys()
