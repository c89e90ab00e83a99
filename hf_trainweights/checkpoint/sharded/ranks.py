"""The ranks that work on one checkpoint together: what one decides all do, and an error of one is an error of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """The processes of a group, of which the first coordinates.

    Args:
        group: A process group of PyTorch with a backend for the CPU, to which all ranks belong and nothing else talks;
            None for this process alone.
    """

    def __init__(self, group: Any = None):
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @property
    def is_coordinator(self) -> bool:
        """Whether this is the first rank."""
        return self.rank == 0

    def decide(self, work: Callable[[], T]) -> T:
        """Do something on the coordinator alone.

        Args:
            work: What to do; what it returns is pickled.

        Returns:
            On every rank what it returned.

        Raises:
            Exception: Whatever it raised, on every rank.
        """
        outcome = _outcome(work) if self.is_coordinator else None
        if self._group is not None:
            box = [outcome]
            dist.broadcast_object_list(box, src=0, group=self._group)
            outcome = box[0]
        assert outcome is not None  # the coordinator's
        value, error = outcome
        _raise(error)
        return cast("T", value)

    def any(self, mine: bool) -> bool:
        """Return on every rank whether something is true on one of them at least.

        Args:
            mine: Whether it is on this rank.
        """
        if self._group is None:
            return mine
        count = torch.tensor(int(mine))
        dist.all_reduce(count, group=self._group)
        return bool(count)

    def scatter(self, work: Callable[[], Sequence[T]]) -> T:
        """Divide something on the coordinator.

        Args:
            work: Returns one value for each rank.

        Returns:
            The value of this rank.

        Raises:
            Exception: Whatever it raised, on every rank.
        """
        values, error = _outcome(work) if self.is_coordinator else (None, None)
        self.decide(lambda: _raise(error))
        if self._group is None:
            assert values is not None  # no error, and this is the coordinator
            return values[0]
        box: list[Any] = [None]
        dist.scatter_object_list(box, list(values) if values is not None else None, src=0, group=self._group)
        return box[0]

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Do something on every rank, and wait for all of them.

        Args:
            work: What to do; what it returns is pickled.

        Returns:
            On the coordinator what each rank returned, in their order; an empty list on the others.

        Raises:
            Exception: On every rank its own error, else that of the first rank that had one.
        """
        mine = _outcome(work)
        outcomes: list[Any] = [mine]
        if self._group is not None:
            box = [None] * self.size if self.is_coordinator else None
            dist.gather_object(mine, box, dst=0, group=self._group)
            outcomes = box or []
        first = self.decide(lambda: next((error for _, error in outcomes if error is not None), None))
        _raise(mine[1] or first)
        return [value for value, _ in outcomes]


def _outcome(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
