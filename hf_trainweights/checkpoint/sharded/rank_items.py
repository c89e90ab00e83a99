"""The items of one rank: where their data come from, as plain contiguous tensors of the CPU, and what is tied."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from hf_trainweights.checkpoint.dcp.shards import shard_name, shard_of
from hf_trainweights.checkpoint.encoded.key_paths import UnstorableError
from hf_trainweights.checkpoint.planning.modes import SIZE_FLOOR
from hf_trainweights.checkpoint.sharded.anchors import ShardedAnchor
from hf_trainweights.checkpoint.sharded.planning import Order

# A weight is compared with others of its shape only if so many of its elements, evenly spread, are the same.
_SAMPLE_ELEMENTS = 64

Resolve = Callable[[WriteItem], Any]


@dataclass(frozen=True)
class RankOrders:
    """What the coordinator tells a rank.

    Args:
        weights_name: Name of the file for weights.
        others_name: Name of the file for everything else.
        orders: How each tensor is stored, by its name in the flattened state dict.
        anchor: What the weights are stored against; None for a full checkpoint.
        drift_rms: By shard how far it moves between saves, if an earlier checkpoint tells.
    """

    weights_name: str
    others_name: str
    orders: Mapping[str, Order] = field(default_factory=dict)
    anchor: ShardedAnchor | None = None
    drift_rms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RankItems:
    """The items of one rank.

    Args:
        directory: The checkpoint.
        items: What the rank stores.
        resolve: Returns a tensor, or the bytes of an object that torch.save wrote.
        orders: What the coordinator says.
        at_hand: All that `resolve` can be asked for, items that other ranks store as well included.
    """

    directory: Path
    items: Sequence[WriteItem]
    resolve: Resolve
    orders: RankOrders
    at_hand: Sequence[WriteItem] = ()

    def order(self, item: WriteItem) -> Order | None:
        """Return how an item is stored; None for an object."""
        return self.orders.orders.get(item.index.fqn)

    @property
    def weights(self) -> list[WriteItem]:
        """The weights and buffers."""
        return [item for item in self.items if (order := self.order(item)) is not None and order.state is None]

    @property
    def others(self) -> list[WriteItem]:
        """States of optimizers, and objects."""
        return [item for item in self.items if (order := self.order(item)) is None or order.state is not None]

    def tensor(self, item: WriteItem) -> Tensor:
        """Return an item's tensor, plain and contiguous on the CPU; the live one where it is that already."""
        return self._live(item).cpu().contiguous()

    def data(self, item: WriteItem) -> bytes:
        """Return the bytes of an object; UnstorableError if it holds more than data: loading that would run code."""
        data = self.resolve(item).getvalue()
        try:
            torch.load(io.BytesIO(data), weights_only=True)
        except Exception as error:
            next_step = "Store numbers, strings, lists, dicts and tensors: nothing else is loaded without trust."
            raise UnstorableError(item.index.fqn, "plain data", str(error)[:200], next_step) from error
        return data

    def twins(self, items: Iterable[WriteItem]) -> dict[str, str]:
        """Find tied weights, which DCP lists once for each name.

        Returns the name of each shard to that of the first one that has the same elements.
        """
        names: dict[str, str] = {}
        first: dict[Any, WriteItem] = {}  # and no tensors: `resolve` may make them
        for item in items:
            tensor = self._live(item)
            key = tensor.shape, tensor.dtype, item.index.offset, _sample(tensor)
            twin = first.setdefault(key, item)
            is_tied = twin is not item and _is_same(self._live(twin), tensor)
            names[name_of(item)] = name_of(twin if is_tied else item)
        return names

    def _live(self, item: WriteItem) -> Tensor:
        tensor = self.resolve(item).detach()
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def name_of(item: WriteItem) -> str:
    """Return the name of an item in an anchor."""
    return shard_name(item.index.fqn, shard_of(item) or "")


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
