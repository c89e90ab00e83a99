"""Several tensors encoded or decoded at once: their codecs spend most of the time outside of Python's lock.

The main thread does so, because training waits for it. A background thread leaves the other cores to the training that
goes on beside it, and works on one tensor after the other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from hf_trainweights.checkpoint.encoded.storages import default_device_cpu

Item = TypeVar("Item")
Result = TypeVar("Result")

# Each thread needs memory of its own, a few times its tensor, and more threads wait for each other in Python.
_MOST_THREADS = 4
# Threads take longer to start than so many bytes to encode.
_SMALLEST_BYTES = 4 << 20
# How far ahead of the first result that was not taken up others are computed, in plain bytes.
_AHEAD_BYTES = 64 << 20


def thread_count() -> int:
    """Return how many threads may work on tensors: 1 beside the main thread, in it as many as PyTorch, at most 4."""
    main = threading.main_thread()
    # While the interpreter exits no thread can be started.
    if threading.current_thread() is not main or not main.is_alive():
        return 1
    return min(torch.get_num_threads(), _MOST_THREADS)


def units_of(order: Iterable[int], needed: Mapping[int, int | None]) -> list[list[int]]:
    """Put each index into one unit with the one that it needs, if that comes before it.

    Args:
        order: Every index once.
        needed: By index the one that it needs.

    Returns:
        Lists of indices; each keeps the order, and they are sorted by their first ones.

    Examples:
        >>> units_of([0, 2, 1, 3], {1: 2})
        [[0], [2, 1], [3]]
    """
    unit_of: dict[int | None, list[int]] = {}
    units: list[list[int]] = []
    for index in order:
        unit = unit_of.get(needed.get(index))
        if unit is None:
            units.append(unit := [])
        unit.append(index)
        unit_of[index] = unit
    return units


def map_in_order(
    function: Callable[[Item], Result], items: Sequence[Item], sizes_bytes: Sequence[int]
) -> Iterator[Result]:
    """Call a function with each item, in `thread_count()` threads, without gradients.

    Args:
        function: Safe to be called from several threads at once.
        items: Its arguments.
        sizes_bytes: For each item the plain bytes that it stands for. Results that nobody has taken yet stand for at
            most 64 MiB, but for one item per thread.

    Yields:
        The results in the order of the items.

    Raises:
        Exception: What the function raised for the first item that failed.
    """
    threads = min(thread_count(), len(items))
    if threads < 2 or sum(sizes_bytes) < _SMALLEST_BYTES:
        for item in items:
            yield _call(function, item)
        return
    torch_threads = torch.get_num_threads()
    try:
        # PyTorch's own threads would be more than there are cores.
        with ThreadPoolExecutor(threads, "trainweights-codec", torch.set_num_threads, (1,)) as pool:
            yield from _results(pool, threads, function, items, sizes_bytes)
    finally:
        torch.set_num_threads(torch_threads)  # the default of later threads was changed too


def _results(
    pool: ThreadPoolExecutor,
    threads: int,
    function: Callable[[Item], Result],
    items: Sequence[Item],
    sizes_bytes: Sequence[int],
) -> Iterator[Result]:
    ahead: deque[tuple[Future[Result], int]] = deque()
    ahead_bytes = 0
    try:
        for item, size_bytes in zip(items, sizes_bytes, strict=True):
            while len(ahead) >= threads and ahead_bytes + size_bytes > _AHEAD_BYTES:
                future, taken_bytes = ahead.popleft()
                ahead_bytes -= taken_bytes
                yield future.result()
            ahead.append((pool.submit(_call, function, item), size_bytes))
            ahead_bytes += size_bytes
        while ahead:
            yield ahead.popleft()[0].result()
    finally:
        for future, _ in ahead:
            future.cancel()


def _call(function: Callable[[Item], Result], item: Item) -> Result:
    # Both are facts of a thread, not of the process.
    with torch.no_grad(), default_device_cpu():
        return function(item)
