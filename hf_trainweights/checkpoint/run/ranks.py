"""The ranks that work on one checkpoint together: what one decides all do, and an error of one is an error of all."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

# What came of some work: what it returned, or what it raised.
Outcome = tuple[Any, Exception | None]

# While the coordinator reads a whole run, the others wait for longer than training ever does.
_PATIENCE = timedelta(days=1)


class Ranks:
    """The processes of a group, of which the first coordinates; without a group this process alone.

    The group has a backend for the CPU, all ranks belong to it, and nothing else talks in it.
    """

    def __init__(self, group: Any = None):
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def decide(self, work: Callable[[], T]) -> T:
        """Return on every rank what `work` returns on the coordinator alone, or raise its error; every rank calls this.

        Within it the coordinator may have all ranks `share` in the work. The others do only what they are told, until
        it has ended. So wherever an error is raised, on whichever rank, none waits for what will not come.
        """
        if self.rank == 0:
            outcome = _outcome(work)
            if self.size > 1:
                self._scatter([(False, _pickled(outcome))] * self.size)
        else:
            is_part, message = self._scatter([])
            while is_part:
                self._gather(_pickled(_outcome(lambda part: pickle.loads(part)(), message)))
                is_part, message = self._scatter([])
            outcome = pickle.loads(message)
        return _value(outcome)

    def share(self, parts: Sequence[Callable[[], T]]) -> list[T]:
        """Have each rank do its part, and return what they returned; the coordinator calls this within `decide`.

        The error of the first rank that had one is raised once all are done. Parts and results are pickled.
        """
        if self.size == 1:
            return [parts[0]()]
        self._scatter([(True, pickle.dumps(part)) for part in parts])
        return [_value(pickle.loads(each)) for each in self._gather(_pickled(_outcome(parts[0])))]

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Return on the coordinator what `work` returned on each rank, on the others nothing; every rank calls this.

        The error of the first rank that had one is raised on all. Results are pickled.
        """
        if self.size == 1:
            return [work()]
        outcomes = self._gather(_pickled(_outcome(work)))
        values: list[T] = []
        self.decide(lambda: values.extend(_value(pickle.loads(each)) for each in outcomes))
        return values

    def any(self, mine: bool) -> bool:
        """Return on every rank whether something is true on one of them at least."""
        if self.size == 1:
            return mine
        count = torch.tensor(int(mine))
        dist.all_reduce(count, group=self._group)
        return bool(count)

    def _scatter(self, messages: list[tuple[bool, bytes]]) -> tuple[bool, bytes]:
        """Return on every rank the coordinator's message for it: a part of the work (True), or how the work ended."""
        box = [(False, b"")]
        dist.scatter_object_list(box, messages or None, group=self._group, group_src=0)
        return box[0]

    def _gather(self, message: bytes) -> list[bytes]:
        """Return on the coordinator the messages of all ranks, nothing on the others."""
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
    """Pickle an outcome; of one that cannot be pickled, or not be read again, its text: others wait for it."""
    try:
        message = pickle.dumps(outcome)
        if outcome[1] is not None:
            pickle.loads(message)
    except Exception as error:
        problem = outcome[1] or error
        message = pickle.dumps((None, RuntimeError(f"{type(problem).__name__}: {problem}")))
    return message


def all_ranks() -> Ranks:
    """Return all ranks, joined by a group of their own, so that they can talk beside training; every rank calls it."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Ranks()
    return Ranks(dist.new_group(timeout=_PATIENCE, backend="gloo"))
