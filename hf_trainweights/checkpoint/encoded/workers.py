"""Threads that encode and decode tensors beside each other; results come in the order of the work.

Threads serve, and no processes, because the loops in C, zstd, digests and checksums do without Python's lock.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

_T = TypeVar("_T")

# What one thread takes in a few milliseconds; less is not worth another one.
_BYTES_PER_WORKER = 4 << 20
# Beyond them the thread that writes cannot keep up.
_MOST_WORKERS = 8
_AHEAD_BYTES = 64 << 20
# Tasks of a worker: so many small tensors go beside one large one.
_AHEAD = 64


def worker_count(size_bytes: int) -> int:
    """Return how many threads should encode or decode so many bytes.

    Where the main thread asks, training waits for the result, and all cores of this rank serve. Any other thread works
    beside training: on the CPU, torch's own threads keep their cores; where CUDA is in use, half of the cores serve.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    cores //= max(int(ranks), 1) if ranks.isdecimal() else 1
    if threading.current_thread() is not threading.main_thread():
        cores = cores // 2 if torch.cuda.is_initialized() else cores - torch.get_num_threads()
    return max(min(cores, size_bytes // _BYTES_PER_WORKER, _MOST_WORKERS), 1)


def default_device_cpu() -> AbstractContextManager[object]:
    """Return a context in which new tensors are on the CPU, whatever default device the caller has set."""
    # As a context, torch.device costs a few microseconds at every call into torch.
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def _alone(task: Callable[[], _T]) -> _T:
    """Do a task without gradients and with new tensors on the CPU, which each thread has to ask for itself."""
    with torch.no_grad(), default_device_cpu():
        return task()


def in_order(
    tasks: Iterable[tuple[int, Callable[[], _T]]], workers: int, kept_bytes: Callable[[_T], int] | None = None
) -> Generator[_T]:
    """Yield the results of tasks in their order; of each task is also said how many bytes it takes up.

    Workers are ahead of the caller by 64 MiB each, or by two tasks: small ones go beside a larger one. What a result
    takes up that waits for its turn, `kept_bytes` says; without it as much as its task. The error of the first task
    that fails is raised in its turn. Close the iterator: then no thread is left.
    """
    if workers < 2:
        yield from (_alone(task) for _, task in tasks)
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="trainweights")
    waiting: deque[Future[tuple[_T, int]]] = deque()
    room, most_tasks = workers * _AHEAD_BYTES, workers * _AHEAD
    taken_bytes, lock = 0, threading.Lock()

    def take(size_bytes: int) -> None:
        nonlocal taken_bytes
        with lock:
            taken_bytes += size_bytes

    def work(size_bytes: int, task: Callable[[], _T]) -> tuple[_T, int]:
        result = _alone(task)
        result_bytes = size_bytes if kept_bytes is None else kept_bytes(result)
        take(result_bytes - size_bytes)
        return result, result_bytes

    def oldest() -> _T:
        result, result_bytes = waiting.popleft().result()
        take(-result_bytes)
        return result

    try:
        for task_bytes, task in tasks:
            size_bytes = min(task_bytes, room // 2)
            while waiting and (taken_bytes + size_bytes > room or len(waiting) >= most_tasks):
                if waiting[0].done() or len(waiting) >= most_tasks:
                    yield oldest()
                else:
                    wait([each for each in waiting if not each.done()], return_when=FIRST_COMPLETED)
            take(size_bytes)
            waiting.append(pool.submit(work, size_bytes, task))
        while waiting:
            yield oldest()
    finally:
        pool.shutdown(cancel_futures=True)
