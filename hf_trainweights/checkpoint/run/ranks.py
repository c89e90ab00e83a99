"""The ranks that work on one checkpoint together: one decides, all follow, and an error of one is raised on all."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

# The result of a call: the value that it returned, and the error that it raised instead.
Outcome = tuple[Any, Exception | None]

# While the coordinator reads all checkpoints of a run, the other ranks wait longer than any step of training takes.
_PATIENCE = timedelta(days=1)


class Ranks:
    """The processes of a group; rank 0 coordinates them. If there is no group, this process is the only rank.

    The group has a backend for the CPU, contains all ranks, and serves these calls alone.
    """

    def __init__(self, group: Any = None):
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def decide(self, work: Callable[[], T]) -> T:
        """Run `work` on the coordinator alone, and return its value or raise its error on all; every rank calls this.

        Inside `work` the coordinator may call `share`, which gives each rank a task. Until `work` ends, the other ranks
        wait for tasks. So no rank waits forever for another one, wherever an error is raised.
        """
        if self.rank == 0:
            outcome = _outcome(work)
            if self.size > 1:
                self._scatter([(False, _pickled(outcome))] * self.size)
        else:
            is_task, message = self._scatter([])
            while is_task:
                self._gather(_pickled(_outcome(lambda task: pickle.loads(task)(), message)))
                is_task, message = self._scatter([])
            outcome = pickle.loads(message)
        return _value(outcome)

    def share(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Run one task on each rank and return the results in their order; the coordinator calls this in `decide`.

        The error of the first rank that had one is raised once all are done. Tasks and results are pickled.
        """
        if self.size == 1:
            return [tasks[0]()]
        self._scatter([(True, pickle.dumps(task)) for task in tasks])
        return [_value(pickle.loads(message)) for message in self._gather(_pickled(_outcome(tasks[0])))]

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank, return all results on the coordinator, else an empty list; every rank calls this.

        The error of the first rank that had one is raised on all. Results are pickled.
        """
        if self.size == 1:
            return [work()]
        messages = self._gather(_pickled(_outcome(work)))
        values: list[T] = []
        self.decide(lambda: values.extend(_value(pickle.loads(message)) for message in messages))
        return values

    def any(self, mine: bool) -> bool:
        """Return on every rank whether `mine` is true on at least one rank; every rank calls this."""
        if self.size == 1:
            return mine
        count = torch.tensor(int(mine))
        dist.all_reduce(count, group=self._group)
        return bool(count)

    def _scatter(self, messages: list[tuple[bool, bytes]]) -> tuple[bool, bytes]:
        """Send each rank its message and return the one for this rank: (True, a task) or (False, the final outcome)."""
        box = [(False, b"")]
        dist.scatter_object_list(box, messages or None, group=self._group, group_src=0)
        return box[0]

    def _gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks on the coordinator, and an empty list on the other ranks."""
        box = [b""] * self.size if self.rank == 0 else None
        dist.gather_object(message, box, group=self._group, group_dst=0)
        return box or []


def _outcome(work: Callable[..., Any], *arguments: Any) -> Outcome:
    try:
        return work(*arguments), None
    except Exception as error:
        return None, error


def _value(outcome: Outcome) -> Any:
    value, error = outcome
    if error is not None:
        raise error
    return value


def _pickled(outcome: Outcome) -> bytes:
    """Pickle an outcome. If that fails, pickle the text of the error instead, because other ranks wait for it."""
    try:
        message = pickle.dumps(outcome)
        if outcome[1] is not None:
            pickle.loads(message)
    except Exception as error:
        problem = outcome[1] or error
        message = pickle.dumps((None, RuntimeError(f"{type(problem).__name__}: {problem}")))
    return message


def all_ranks() -> Ranks:
    """Return all ranks in a new group, whose messages do not mix with those of training; every rank calls this."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Ranks()
    return Ranks(dist.new_group(timeout=_PATIENCE, backend="gloo"))
