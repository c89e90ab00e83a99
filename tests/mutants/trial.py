"""Runs pytest in a forked process, which may import one module from memory: with a fault, and never from the disk.

A fork has what the process before it has imported, so a trial need not import PyTorch and Transformers again.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
from mutants.every_process.sitecustomize import spread

# A trial of which no process has used the CPU for so long waits for itself: it counts as stopped.
_IDLE_SECONDS = 120.0
_MEMORY_BYTES = 8 << 30  # beside what is mapped already
_POLL_SECONDS = 0.05
_OPTIONS = ("-q", "-p", "no:cacheprovider", "--disable-plugin-autoload")

Line = tuple[str, int]  # of a file
IMPORT = "import"  # in the place of a test, while there is none yet


def function_of(test: str) -> str:
    """Return a test without the parameters of its case."""
    return test.partition("[")[0]


class Chosen:
    """A plugin that runs some tests in a given order, and writes down which one runs.

    Args:
        order: The tests that come first; those that are not named here follow.
        left_out: Tests that do not run; a function without brackets stands for all its cases.
        running: The file that has the test that runs; what it was when the process ended stays in it.
        seconds: Processor time for one test, after which the process is killed.
    """

    def __init__(self, order: Sequence[str], left_out: Collection[str], running: Path, seconds: int) -> None:
        self._places = {test: number for number, test in enumerate(order)}
        self._left_out, self._running, self._seconds = left_out, running, seconds

    def pytest_sessionstart(self) -> None:
        self._limit()  # modules may loop while they are imported

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        names = {item: {item.nodeid, function_of(item.nodeid)} for item in items}
        chosen = [item for item in items if names[item].isdisjoint(self._left_out)]
        items[:] = sorted(chosen, key=lambda item: self._places.get(item.nodeid, len(self._places)))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running.write_text(nodeid, encoding="utf-8")
        self._limit()

    def _limit(self) -> None:
        limit = int(time.process_time()) + 1 + self._seconds
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


class Reach:
    """A plugin that writes down which tests fail, how long each takes, and which of some lines it runs.

    Args:
        lines: The lines.
        write: Gets the failed tests, the seconds of each test, and the tests of each line; among these `IMPORT`.
    """

    def __init__(
        self, lines: Collection[Line], write: Callable[[set[str], dict[str, float], dict[Line, set[str]]], None]
    ) -> None:
        self._write = write
        self._failed: set[str] = set()
        self._seconds: dict[str, float] = {}
        self._tests: dict[Line, set[str]] = {line: set() for line in lines}
        self._files = {file for file, _ in lines}
        self._test = IMPORT

    @pytest.hookimpl(wrapper=True)
    def pytest_load_initial_conftests(self) -> Iterator[None]:
        with self._traced():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        with self._traced():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._test, began = item.nodeid, time.monotonic()
        with self._traced():
            result = yield
        self._seconds[item.nodeid] = time.monotonic() - began
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._write(self._failed, self._seconds, self._tests)

    @contextlib.contextmanager
    def _traced(self) -> Iterator[None]:
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)  # pyright: ignore[reportArgumentType]

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._step if frame.f_code.co_filename in self._files else None

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        tests = self._tests.get((frame.f_code.co_filename, frame.f_lineno))
        if tests is not None:
            tests.add(self._test)
        return self._step


def run(
    arguments: Sequence[str], plugin: object, folder: Path, log: Path, faulty: tuple[str, str] | None = None
) -> int:
    """Run pytest in a forked process, and return its exit code: negative is the signal that killed it.

    Args:
        arguments: For pytest.
        plugin: A plugin for it.
        folder: Where it runs.
        log: What it prints.
        faulty: A module and the source that it has instead of its own.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return _wait(child)
    code = 3
    try:
        gc.freeze()  # a collection would visit, and so copy, all that the fork shares with its parent
        os.setsid()
        os.chdir(folder)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        mapped = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (mapped + _MEMORY_BYTES, resource.RLIM_INFINITY))
        if faulty is not None:
            spread(*faulty, log.with_name("fault.json"))
        code = int(pytest.main([*_OPTIONS, *arguments], plugins=[plugin]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _wait(child: int) -> int:
    """Return the exit code of a process, which is killed once it waits for itself; with all that it has started."""
    used, since, checked = -1.0, time.monotonic(), 0.0
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() - checked > _IDLE_SECONDS / 20:
            checked, now = time.monotonic(), _cpu_seconds(child)
            if now != used:
                used, since = now, checked
            elif checked - since > _IDLE_SECONDS:
                os.killpg(child, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status)


def _cpu_seconds(process: int) -> float:
    """Return the processor time of a process and of all below it."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process)
        for each in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += sum(each.cpu_times()[:2])
    return total
