"""The items of one rank: their data as plain contiguous tensors of the CPU, what is tied, and the states of Adam."""

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
from hf_trainweights.checkpoint.planning.optimizers import ADAM, ADAM_GROUP, rule_of
from hf_trainweights.checkpoint.planning.policy import OPTIMIZER_ROLES, SIZE_FLOOR
from hf_trainweights.checkpoint.planning.roles import MOMENTS
from hf_trainweights.checkpoint.run.anchors import expected_drift_rms, second_moments
from hf_trainweights.errors import UnstorableError

# A weight is compared with others of its shape only if so many of its elements, evenly spread, are the same.
_SAMPLE_ELEMENTS = 64

# Settings of the group of a parameter that the estimate of drift needs, and those that it takes.
_REQUIRED_FIELDS = ("lr", "betas")
_FIELDS = (*_REQUIRED_FIELDS, "eps")


@dataclass(frozen=True)
class RankOrders:
    """What the coordinator tells a rank: names of its files, plans by name of the value, and what it knows of shards.

    `anchors` are the digest and path of the anchor of each, none for a full checkpoint. `step_rms` is how far each
    moves, None where it is new; empty if no earlier checkpoint tells. `optimizer_class` is None if nobody knows it.
    """

    weights_name: str
    others_name: str
    plans: Mapping[str, TensorPlan] = field(default_factory=dict)
    anchors: Mapping[str, tuple[str, Path]] = field(default_factory=dict)
    step_rms: Mapping[str, float | None] = field(default_factory=dict)
    optimizer_class: str | None = None


@dataclass(frozen=True)
class RankItems:
    """The items of one rank, and what the coordinator says.

    `resolve` returns a tensor, or the bytes of an object that torch.save wrote. `at_hand` is all that it can be asked
    for, items that other ranks store as well included.
    """

    directory: Path
    items: Sequence[WriteItem]
    resolve: Callable[[WriteItem], Any]
    orders: RankOrders
    at_hand: Sequence[WriteItem] = ()

    def plan(self, item: WriteItem) -> TensorPlan | None:
        """Return how an item is stored; None for an object."""
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
        """Return an item's tensor, plain and contiguous on the CPU; the live one where it is that already."""
        return self._live(item).cpu().contiguous()

    def data(self, item: WriteItem) -> bytes:
        """Return the bytes of an object; UnstorableError if it holds more than data: loading that would run code."""
        data = self.resolve(item).getvalue()
        try:
            torch.load(io.BytesIO(data), weights_only=True)
        except Warning:
            raise
        except Exception as error:
            next_step = "Store numbers, strings, lists, dicts and tensors: nothing else is loaded without trust."
            called = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
            found = f"a call of {' and '.join(called)}" if called else str(error)[:200]
            raise UnstorableError(item.index.fqn, "plain data", found, next_step) from error
        return data

    def with_firsts(self, items: Iterable[WriteItem]) -> Iterator[tuple[WriteItem, WriteItem, Tensor]]:
        """Yield each item, the first one of the same elements, and its tensor: DCP lists tied weights by every name."""
        first: dict[Any, WriteItem] = {}  # and no tensors: `resolve` may make them
        for item in items:
            tensor = self._live(item)
            key = tensor.shape, tensor.dtype, item.index.offset, _sample(tensor)
            twin = first.setdefault(key, item)
            is_tied = twin is not item and _is_same(self._live(twin), tensor)
            yield item, twin if is_tied else item, tensor

    def _live(self, item: WriteItem) -> Tensor:
        tensor = self.resolve(item).detach()
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        require_storable(local, (item.index.fqn,))
        return local


class AdamStates:
    """The states of Adam among the items of a rank, found once for all of its weights."""

    def __init__(self, rank: RankItems):
        self._rank = rank
        # By parameter and optimizer.
        self._states: dict[str, dict[str, list[tuple[str, WriteItem]]]] = defaultdict(lambda: defaultdict(list))
        self._weights: dict[str, list[str]] = defaultdict(list)  # of all models, by the name in each
        for item in rank.at_hand:
            plan = rank.plan(item)
            if plan is None:
                continue
            optimizer, _, key = item.index.fqn.rpartition(f"state.{plan.name}.")
            if is_weight(plan):
                self._weights[plan.name].append(item.index.fqn)
            elif key == "step" or plan.role in MOMENTS:
                self._states[plan.name][optimizer].append((key, item))
        self._groups = Groups(rank)

    def drift_rms(self, item: WriteItem) -> float | None:
        """Estimate how far a shard of a weight moves between two saves; None where its state or group is not here."""
        name, optimizer, state = self._state(item)
        group = self._groups.read(optimizer or "", name, _FIELDS) if state else {}
        if not group.keys() >= set(_REQUIRED_FIELDS):
            return None
        tree = {"state": {name: state}, "param_groups": [{**group, "params": [name]}]}
        return expected_drift_rms(tree, {name: name}, optimizer_class=ADAM).get(name)

    def second_moment(self, item: WriteItem) -> dict[str, Tensor]:
        """Return the `exp_avg_sq` of a shard of a weight, by the weight's name; nothing where its state is not here."""
        name, _, state = self._state(item)
        tree = {"state": {name: state}, "param_groups": [{**ADAM_GROUP, "params": [name]}]}
        return second_moments(tree, {name: name}, ADAM)

    def _state(self, item: WriteItem) -> tuple[str, str | None, dict[str, Tensor]]:
        """Return a weight's name, its optimizer, and of its state what is here."""
        name = self._rank.orders.plans[item.index.fqn].name
        optimizer = self._optimizer(item.index.fqn, name)
        found = [] if optimizer is None else self._states[name][optimizer]
        # A step is that of all shards.
        of_shard = [(key, each) for key, each in found if key == "step" or each.index.offset == item.index.offset]
        return name, optimizer, {key: self._rank.tensor(each) for key, each in of_shard}

    def _optimizer(self, weight: str, name: str) -> str | None:
        """Return the optimizer of a weight's model: the one next to it, if that is not nearer to another model."""
        adams = (each for each, found in self._states[name].items() if MOMENTS & dict(found).keys())
        shared = {each: _shared_keys(each, weight) for each in adams}
        nearest = [each for each, keys in shared.items() if keys == max(shared.values())]
        is_its_own = len(nearest) == 1 and all(
            _shared_keys(nearest[0], other) <= shared[nearest[0]] for other in self._weights[name]
        )
        return nearest[0] if is_its_own else None


class Groups:
    """The groups of optimizers among the items of a rank: their settings by the parameter.

    DCP keeps them as one list at `param_groups`, as fields at `param_groups.0.lr` ..., or flat, as fields at
    `param_groups.<parameter>.lr` ...
    """

    def __init__(self, rank: RankItems):
        self._rank = rank
        self._items = {item.index.fqn: item for item in rank.at_hand if "param_groups" in item.index.fqn}
        self._fields: dict[str, set[str]] = defaultdict(set)  # by the name of the group
        for name in self._items:
            group, _, key = name.rpartition(".")
            self._fields[group].add(key)
        self._of_parameters: dict[str, dict[str, Mapping[str, Any] | str]] = {}  # a group, or its name

    def settings(self, optimizer: str, parameter: str) -> Collection[str]:
        """Return the keys of a parameter's group; none where the rank does not have it."""
        group = self._group(optimizer, parameter)
        return self._fields[group] if isinstance(group, str) else group.keys()

    def read(self, optimizer: str, parameter: str, keys: Iterable[str]) -> dict[str, Any]:
        """Return some settings of a parameter's group, as far as the rank has them."""
        group = self._group(optimizer, parameter)
        if isinstance(group, str):
            return {key: self._load(f"{group}.{key}") for key in keys if key in self._fields[group]}
        return {key: group[key] for key in keys if key in group}

    def _group(self, optimizer: str, parameter: str) -> Mapping[str, Any] | str:
        prefix = f"{optimizer}param_groups"
        if prefix not in self._of_parameters:
            self._of_parameters[prefix] = dict(self._listed(prefix))
        return self._of_parameters[prefix].get(parameter, f"{prefix}.{parameter}")

    def _listed(self, prefix: str) -> Iterator[tuple[str, Mapping[str, Any] | str]]:
        """Yield the parameters of groups that stand in a list, and the group of each."""
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
    """Return the items of a rank with exact plans for states that were planned as Adam's and are another optimizer's.

    The coordinator does not see the groups before it plans; each rank has those of its states at hand.
    """
    if rank.orders.optimizer_class is not None:
        return rank
    plans, groups = dict(rank.orders.plans), Groups(rank)
    for name, plan in rank.orders.plans.items():
        if plan.role in MOMENTS:
            optimizer = name.rpartition(f"state.{plan.name}.")[0]
            if rule_of(None, groups.settings(optimizer, plan.name)) is None:
                plans[name] = TensorPlan("other", plan.name, ())
    return replace(rank, orders=replace(rank.orders, plans=plans))


def is_weight(plan: TensorPlan | None) -> bool:
    """Return whether a plan is of a weight or buffer, not of an optimizer's state or (None) an object."""
    return plan is not None and plan.role not in OPTIMIZER_ROLES


def second_of(item: WriteItem, plan: TensorPlan | None) -> MetadataIndex | None:
    """Return the index of the second moment in terms of which an item is stored; None for all other items."""
    is_first = plan is not None and plan.exp_avg_sq is not None
    return MetadataIndex(f"{item.index.fqn}_sq", item.index.offset) if is_first else None


def _shared_keys(first: str, second: str) -> int:
    return [*map(operator.eq, first.split("."), second.split(".")), False].index(False)


def _sample(tensor: Tensor) -> bytes:
    """Return some of a tensor's bytes, or where it lies if it is not on the CPU: then only the same one is tied."""
    if not tensor.is_cpu or tensor.numel() < SIZE_FLOOR:
        return repr((tensor.data_ptr(), tensor.stride(), tensor.numel())).encode()
    sample = tensor.reshape(-1)[:: tensor.numel() // _SAMPLE_ELEMENTS].contiguous()
    return sample.view(torch.uint8).numpy().tobytes()


def _is_same(first: Tensor, second: Tensor) -> bool:
    if first.data_ptr() == second.data_ptr() and first.stride() == second.stride():
        return first.numel() > 0
    if not first.is_cpu or first.numel() < SIZE_FLOOR:
        return False
    # As bytes: a NaN equals itself, and zeros of either sign differ.
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
