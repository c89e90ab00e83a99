"""The states of Adam that a rank has at hand: they tell how far weights move, and which never had a gradient."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from hf_trainweights.checkpoint.planning.modes import MOMENTS
from hf_trainweights.checkpoint.run.drift import expected_drift_rms, second_moments
from hf_trainweights.checkpoint.sharded.rank_items import RankItems

_FIELDS = ("lr", "betas")


class AdamStates:
    """The states of Adam among the items of a rank, found once for all of its weights.

    Args:
        rank: The items.
    """

    def __init__(self, rank: RankItems):
        self._rank = rank
        self._moments: dict[Any, dict[str, WriteItem]] = defaultdict(dict)  # by parameter and offset
        self._steps: dict[str, WriteItem] = {}
        self._optimizers: dict[str, str] = {}
        for item in rank.at_hand:
            order = rank.order(item)
            state = order.state if order is not None else None
            if state is None:
                continue
            if state.key == "step":
                self._steps[state.parameter] = item
            elif state.key in MOMENTS:
                self._moments[state.parameter, item.index.offset][state.key] = item
                self._optimizers[state.parameter] = state.optimizer
        self._of_groups = {item.index.fqn: item for item in rank.at_hand if "param_groups" in item.index.fqn}
        self._groups: dict[str, dict[str, Mapping[str, Any]]] = {}  # by optimizer and parameter

    def drift_rms(self, item: WriteItem) -> float | None:
        """Estimate how far a shard of a weight moves between two saves; None where its state or group is not here."""
        name, state = self._state(item)
        group = self._group(name) if state else {}
        if not group.keys() >= set(_FIELDS):
            return None
        tree = {"state": {name: state}, "param_groups": [{**group, "params": [name]}]}
        return expected_drift_rms(tree, {name: name}).get(name)

    def second_moment(self, item: WriteItem) -> dict[str, Tensor]:
        """Return the `exp_avg_sq` of a shard of a weight, by the weight's name; nothing where its state is not here."""
        name, state = self._state(item)
        return second_moments({"state": {name: state}, "param_groups": []}, {name: name})

    def _state(self, item: WriteItem) -> tuple[str, dict[str, Tensor]]:
        name = self._rank.orders.orders[item.index.fqn].plan.name
        items = dict(self._moments.get((name, item.index.offset), {}))
        if items and name in self._steps:
            items["step"] = self._steps[name]
        return name, {key: self._rank.tensor(each) for key, each in items.items()}

    def _group(self, parameter: str) -> Mapping[str, Any]:
        """Return learning rate and betas of a parameter's group, as far as the rank has them."""
        optimizer = self._optimizers[parameter]
        prefix = f"{optimizer}.param_groups" if optimizer else "param_groups"
        if prefix not in self._groups:
            self._groups[prefix] = dict(self._read_groups(prefix))
        return self._groups[prefix].get(parameter) or self._fields(f"{prefix}.{parameter}")

    def _read_groups(self, prefix: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield parameters and groups, which DCP keeps as one list at `param_groups`, or at `param_groups.0` ..."""
        if prefix in self._of_groups:
            for group in self._load(prefix):
                if isinstance(group, Mapping):
                    yield from ((str(name), group) for name in group.get("params", ()))
        number = 0
        while f"{prefix}.{number}.params" in self._of_groups:
            group = self._fields(f"{prefix}.{number}")
            yield from ((str(name), group) for name in self._load(f"{prefix}.{number}.params"))
            number += 1

    def _fields(self, group: str) -> dict[str, Any]:
        return {field: self._load(f"{group}.{field}") for field in _FIELDS if f"{group}.{field}" in self._of_groups}

    def _load(self, name: str) -> Any:
        item = self._of_groups[name]
        if item.tensor_data is not None:
            return self._rank.tensor(item)
        return torch.load(io.BytesIO(self._rank.data(item)), weights_only=True)
