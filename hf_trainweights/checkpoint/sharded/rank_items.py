"""The items that one rank saves: their data as plain contiguous CPU tensors, tied weights, and the states of Adam."""

from __future__ import annotations

import io
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from hf_trainweights.checkpoint.encoded.storage_tasks import TensorPlan
from hf_trainweights.checkpoint.encoded.tree import require_storable
from hf_trainweights.checkpoint.planning.optimizers import ADAM_GROUP, is_adam
from hf_trainweights.checkpoint.planning.policy import SIZE_FLOOR
from hf_trainweights.checkpoint.planning.roles import MOMENTS
from hf_trainweights.checkpoint.planning.update_rules import ADAM, OPTIMIZER_ROLES
from hf_trainweights.checkpoint.run.anchors import expected_drift_rms, second_moments
from hf_trainweights.errors import UnstorableError

# A weight is compared with others of its shape only if this many of its elements, evenly spread, are the same.
_SAMPLE_ELEMENTS = 64

# Settings of a parameter's group that the estimate of drift needs, and all that it uses.
_REQUIRED_FIELDS = ("lr", "betas")
_FIELDS = (*_REQUIRED_FIELDS, "eps")

_ADAM_KEYS = (*MOMENTS, "max_exp_avg_sq")


@dataclass(frozen=True)
class RankOrders:
    """The coordinator's message to a rank: the names of its files, plans by name of the value, and facts about shards.

    `anchors` has the digest and path of each shard's anchor file, from whose weights differences are stored; it is
    empty for a full checkpoint, which stores the weights themselves. `step_rms` has the drift of each shard: the root
    mean square of the change of its weights from one save to the next. It is None for a shard that no earlier save had,
    and the dict is empty if no save recorded it. `optimizer_class` is None if the class is unknown.
    """

    weights_name: str
    others_name: str
    plans: Mapping[str, TensorPlan] = field(default_factory=dict)
    anchors: Mapping[str, tuple[str, Path]] = field(default_factory=dict)
    step_rms: Mapping[str, float | None] = field(default_factory=dict)
    optimizer_class: str | None = None


@dataclass(frozen=True)
class RankItems:
    """The items that one rank stores, and the coordinator's orders.

    `resolve` returns the tensor of an item, or an object's bytes as torch.save wrote them. `at_hand` are all items that
    `resolve` can return, also those that other ranks store.
    """

    directory: Path
    items: Sequence[WriteItem]
    resolve: Callable[[WriteItem], Any]
    orders: RankOrders
    at_hand: Sequence[WriteItem] = ()

    def plan(self, item: WriteItem) -> TensorPlan | None:
        """Return the plan of an item; None for an object."""
        return self.orders.plans.get(item.index.fqn)

    @property
    def weights(self) -> list[WriteItem]:
        """The weights and buffers."""
        return [item for item in self.items if is_weight(self.plan(item))]

    @property
    def others(self) -> list[WriteItem]:
        """States of optimizers, and objects."""
        return [item for item in self.items if not is_weight(self.plan(item))]

    def tensor(self, item: WriteItem) -> Tensor:
        """Return an item's tensor, plain and contiguous on the CPU; not copied if the live tensor is that already."""
        return self._live(item).cpu().contiguous()

    def data(self, item: WriteItem) -> bytes:
        """Return the bytes of an object; UnstorableError: loading it would run code, as it holds more than data."""
        data = self.resolve(item).getvalue()
        try:
            torch.load(io.BytesIO(data), weights_only=True)
        except Warning:
            raise
        except Exception as error:
            next_step = "Store numbers, strings, lists, dicts and tensors: nothing else is loaded without trust."
            called = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
            content = f"a call of {' and '.join(called)}" if called else str(error)[:200]
            raise UnstorableError(item.index.fqn, "plain data", content, next_step) from error
        return data

    def with_firsts(self, items: Iterable[WriteItem]) -> Iterator[tuple[WriteItem, WriteItem, Tensor]]:
        """Yield each item, the first one with the same elements, and its tensor: DCP repeats tied weights."""
        first_items: dict[Any, WriteItem] = {}  # holds no tensors, because `resolve` may make new ones in memory
        for item in items:
            tensor = self._live(item)
            key = tensor.shape, tensor.dtype, item.index.offset, _sample(tensor)
            twin = first_items.setdefault(key, item)
            is_tied = twin is not item and _is_same(self._live(twin), tensor)
            yield item, twin if is_tied else item, tensor

    def _live(self, item: WriteItem) -> Tensor:
        tensor = self.resolve(item).detach()
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        require_storable(local, (item.index.fqn,))
        return local


class AdamStates:
    """The states of Adam among the items of a rank, listed once for all of its weights."""

    def __init__(self, rank: RankItems):
        self._rank = rank
        # By parameter and optimizer.
        self._states: dict[str, dict[str, list[tuple[str, WriteItem]]]] = defaultdict(lambda: defaultdict(list))
        self._weights: dict[str, list[str]] = defaultdict(list)  # full names, by the name in one of the models
        for item in rank.at_hand:
            plan = rank.plan(item)
            if plan is None:
                continue
            optimizer, _, key = item.index.fqn.rpartition(f"state.{plan.name}.")
            if is_weight(plan):
                self._weights[plan.name].append(item.index.fqn)
            elif key == "step" or (key in _ADAM_KEYS and plan.role != "other"):
                self._states[plan.name][optimizer].append((key, item))
        self._groups = Groups(rank)
        # Whether the states listed above are Adam's. If the class of the optimizer is unknown, they are: `settled` has
        # looked at the optimizer's groups before, and given the role "other" to states of any other optimizer.
        self._are_adams = is_adam(rank.orders.optimizer_class or ADAM, ADAM_GROUP)

    def drift_rms(self, item: WriteItem) -> float | None:
        """Estimate how far a shard of a weight moves between two saves; None if the rank lacks its state or group."""
        name, optimizer, state = self._state(item)
        group = self._groups.read(optimizer or "", name, _FIELDS) if state else {}
        if not group.keys() >= set(_REQUIRED_FIELDS):
            return None
        tree = {"state": {name: state}, "param_groups": [{**group, "params": [name]}]}
        return expected_drift_rms(tree, {name: name}, optimizer_class=ADAM).get(name)

    def second_moment(self, item: WriteItem) -> dict[str, Tensor]:
        """Return the `exp_avg_sq` of a weight's shard, by the weight's name; empty if the rank lacks its state."""
        name, _, state = self._state(item)
        tree = {"state": {name: state}, "param_groups": [{**ADAM_GROUP, "params": [name]}]}
        return second_moments(tree, {name: name}, ADAM)

    def _state(self, item: WriteItem) -> tuple[str, str | None, dict[str, Tensor]]:
        """Return the name of a weight, its optimizer, and the states of its shard that the rank has."""
        name = self._rank.orders.plans[item.index.fqn].name
        optimizer = self._optimizer(item.index.fqn, name)
        states = [] if optimizer is None or not self._are_adams else self._states[name][optimizer]
        # All shards share one step.
        of_shard = [(key, state) for key, state in states if key == "step" or state.index.offset == item.index.offset]
        return name, optimizer, {key: self._rank.tensor(state) for key, state in of_shard}

    def _optimizer(self, weight: str, name: str) -> str | None:
        """Return the optimizer of a weight's model: its name shares the most leading keys with the weight's name.

        None if several share as many, or if that one shares more keys with the same weight of another model.
        """
        adams = (optimizer for optimizer, states in self._states[name].items() if MOMENTS & dict(states).keys())
        shared = {optimizer: _shared_keys(optimizer, weight) for optimizer in adams}
        nearest = [optimizer for optimizer, keys in shared.items() if keys == max(shared.values())]
        is_its_own = len(nearest) == 1 and all(
            _shared_keys(nearest[0], other) <= shared[nearest[0]] for other in self._weights[name]
        )
        return nearest[0] if is_its_own else None


class Groups:
    """The parameter groups of optimizers among the items of a rank: their settings by parameter.

    DCP stores groups in one of three ways: as one list at `param_groups`, as fields at `param_groups.0.lr` ..., or
    flat, as fields at `param_groups.<parameter>.lr` ...
    """

    def __init__(self, rank: RankItems):
        self._rank = rank
        self._items = {item.index.fqn: item for item in rank.at_hand if "param_groups" in item.index.fqn}
        self._fields: dict[str, set[str]] = defaultdict(set)  # by the name of the group
        for name in self._items:
            group, _, key = name.rpartition(".")
            self._fields[group].add(key)
        self._by_parameter: dict[str, dict[str, Mapping[str, Any] | str]] = {}  # a group, or its name

    def settings(self, optimizer: str, parameter: str) -> Collection[str]:
        """Return the keys of a parameter's group; empty if the rank does not have the group."""
        group = self._group(optimizer, parameter)
        return self._fields[group] if isinstance(group, str) else group.keys()

    def read(self, optimizer: str, parameter: str, keys: Iterable[str]) -> dict[str, Any]:
        """Return the settings `keys` of a parameter's group, as far as the rank has them."""
        group = self._group(optimizer, parameter)
        if isinstance(group, str):
            return {key: self._load(f"{group}.{key}") for key in keys if key in self._fields[group]}
        return {key: group[key] for key in keys if key in group}

    def _group(self, optimizer: str, parameter: str) -> Mapping[str, Any] | str:
        prefix = f"{optimizer}param_groups"
        if prefix not in self._by_parameter:
            self._by_parameter[prefix] = dict(self._listed(prefix))
        return self._by_parameter[prefix].get(parameter, f"{prefix}.{parameter}")

    def _listed(self, prefix: str) -> Iterator[tuple[str, Mapping[str, Any] | str]]:
        """Yield each parameter of the groups that are stored as a list, with its group or the group's name."""
        if prefix in self._items:
            for group in self._load(prefix):
                if isinstance(group, Mapping):
                    yield from ((str(name), group) for name in group.get("params", ()))
        number = 0
        while f"{prefix}.{number}.params" in self._items:
            group = f"{prefix}.{number}"
            yield from ((str(name), group) for name in self._load(f"{group}.params"))
            number += 1

    def _load(self, name: str) -> Any:
        item = self._items[name]
        if item.tensor_data is not None:
            return self._rank.tensor(item)
        return torch.load(io.BytesIO(self._rank.data(item)), weights_only=True)


def settled(rank: RankItems) -> RankItems:
    """Return the items of a rank with exact plans for states that were planned as Adam's, but are another optimizer's.

    The coordinator plans without the groups, as only the ranks have them; they show which optimizer it is.
    """
    if rank.orders.optimizer_class is not None:
        return rank
    plans, groups = dict(rank.orders.plans), Groups(rank)
    for name, plan in rank.orders.plans.items():
        if not is_weight(plan) and plan.role != "other":
            optimizer = name.rpartition(f"state.{plan.name}.")[0]
            if not is_adam(None, groups.settings(optimizer, plan.name)):
                plans[name] = TensorPlan("other", plan.name, ())
    return replace(rank, orders=replace(rank.orders, plans=plans))


def is_weight(plan: TensorPlan | None) -> bool:
    """Return whether a plan is for a weight or buffer, not for an optimizer's state or (None) an object."""
    return plan is not None and plan.role not in OPTIMIZER_ROLES


def second_of(item: WriteItem, plan: TensorPlan | None) -> MetadataIndex | None:
    """Return the index of the second moment (exp_avg_sq) that a first moment (exp_avg) is encoded relative to.

    None for an item of another kind, or one that is encoded by itself.
    """
    if plan is None or plan.exp_avg_sq is None:
        return None
    parameter = item.index.fqn.rpartition(".")[0]
    return MetadataIndex(f"{parameter}.{plan.exp_avg_sq[-1]}", item.index.offset)


def _shared_keys(first: str, second: str) -> int:
    return [*map(operator.eq, first.split("."), second.split(".")), False].index(False)


def _sample(tensor: Tensor) -> bytes:
    """Return some bytes of a tensor; if it is small or not on the CPU, its address, so that only itself is tied."""
    if not tensor.is_cpu or tensor.numel() < SIZE_FLOOR:
        return repr((tensor.data_ptr(), tensor.stride(), tensor.numel())).encode()
    sample = tensor.reshape(-1)[:: tensor.numel() // _SAMPLE_ELEMENTS].contiguous()
    return sample.view(torch.uint8).numpy().tobytes()


def _is_same(first: Tensor, second: Tensor) -> bool:
    if first.data_ptr() == second.data_ptr() and first.stride() == second.stride():
        return first.numel() > 0
    if not first.is_cpu or first.numel() < SIZE_FLOOR:
        return False
    # Bytes are compared, so a NaN equals itself, and zeros of different sign differ.
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
