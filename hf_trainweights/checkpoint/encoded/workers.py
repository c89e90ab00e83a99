"""Runs tasks that encode and decode tensors in threads, and yields their results in order.

Threads suffice, processes are not needed: the loops in C, zstd, digests and checksums run without Python's lock.
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

# One thread encodes this much in a few milliseconds. Less work is not worth another thread.
_BYTES_PER_WORKER = 4 << 20
# The thread that writes cannot keep up with more.
_MOST_WORKERS = 8
# Per worker, the most bytes and the most tasks that are begun before the caller has taken their results. With 64 tasks,
# other threads do many small tensors while one does a large one.
_AHEAD_BYTES = 64 << 20
_AHEAD = 64


def worker_count(size_bytes: int) -> int:
    """Return the number of threads that should encode or decode `size_bytes`.

    If the main thread asks, training waits for the result, so the threads may use all cores of this rank. Any other
    thread works beside training. Then, if training uses CUDA, the threads may use half of the cores, and otherwise the
    cores that torch's own threads leave.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    cores //= max(int(ranks), 1) if ranks.isdecimal() else 1
    if threading.current_thread() is not threading.main_thread():
        cores = cores // 2 if torch.cuda.is_initialized() else cores - torch.get_num_threads()
    return max(min(cores, size_bytes // _BYTES_PER_WORKER, _MOST_WORKERS), 1)


def default_device_cpu() -> AbstractContextManager[object]:
    """Return a context in which new tensors are on the CPU, whatever default device the caller has set."""
    # torch.device as a context costs a few microseconds at every call into torch, so it is avoided where possible.
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def _run(task: Callable[[], _T]) -> _T:
    """Run a task without gradients and with new tensors on the CPU, two settings that each thread has of its own."""
    with torch.no_grad(), default_device_cpu():
        return task()


def in_order(
    tasks: Iterable[tuple[int, Callable[[], _T]]], workers: int, kept_bytes: Callable[[_T], int] | None = None
) -> Generator[_T]:
    """Run tasks in threads, and yield their results in the order of the tasks. A task comes with its memory in bytes.

    Tasks and results that wait for the caller take at most 64 MiB for each worker, except that two tasks always fit.
    `kept_bytes` returns the memory of a result; by default it is that of its task. The error of the first task that
    fails is raised in its turn. Closing the iterator ends all threads.
    """
    if workers < 2:
        yield from (_run(task) for _, task in tasks)
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
        result = _run(task)
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
                    wait([future for future in waiting if not future.done()], return_when=FIRST_COMPLETED)
            take(size_bytes)
            waiting.append(pool.submit(work, size_bytes, task))
        while waiting:
            yield oldest()
    finally:
        pool.shutdown(cancel_futures=True)
