"""A function in a forked child that is killed: after a time, or at one of its calls to the file system."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from forks import exit_code_of, fork

from hf_trainweights.files import disk

# A tiny model's work takes a second or two; what takes this long hangs.
LIMIT_SECONDS = 120.0

_CHANGES = frozenset({"create", "write", "fsync", "sync_file", "sync_directory", "link", "rename", "unlink", "mkdir"})


@dataclass(frozen=True)
class Kill:
    """When a child dies; never, if both are None.

    Args:
        seconds: After this time.
        call: At this call of the package to the file system, counted from 1.
    """

    seconds: float | None = None
    call: int | None = None

    def __str__(self) -> str:
        if self.call is not None:
            return f"at call {self.call} to the file system"
        return "never" if self.seconds is None else f"after {self.seconds:.4f} s"


@dataclass(frozen=True)
class Outcome:
    """What became of a child.

    Args:
        killed: Whether it was killed as planned.
        code: Its exit code otherwise; None if it was stopped because it hung.
        seconds: How long it ran.
        calls: How many calls to the file system it made; 0 unless it came to its end.
        text: What it printed, and its traceback.
    """

    killed: bool
    code: int | None
    seconds: float
    calls: int
    text: str


class CountingDisk(disk.FileSystem):
    """Counts the calls that change something, and kills the process right before one of them."""

    def __init__(self, die_at: int | None):
        self.die_at = die_at
        self.count = 0

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name in _CHANGES:
            self.count += 1
            if self.count == self.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return method


def run_in_child(function: Callable[[], None], log: Path, kill: Kill | None = None) -> Outcome:
    """Call a function in a forked child.

    Args:
        function: What to call; an exception is an exit code other than 0.
        log: A file that takes what the child prints.
        kill: When to kill the child.
    """
    kill = kill or Kill()
    count = log.with_suffix(".calls")
    count.unlink(missing_ok=True)
    started = time.monotonic()
    child = fork(partial(_be_child, function, log, count, kill.call))
    limit = LIMIT_SECONDS if kill.seconds is None else kill.seconds
    descriptor = os.pidfd_open(child)
    try:
        ended, _, _ = select.select([descriptor], [], [], limit)
    finally:
        os.close(descriptor)
    if not ended:
        os.kill(child, signal.SIGKILL)
    code = exit_code_of(child)
    hung = not ended and kill.seconds is None
    calls = int(count.read_text()) if count.exists() else 0
    text = log.read_text(errors="replace") if log.exists() else ""
    killed = code == -signal.SIGKILL and not hung
    return Outcome(killed, None if hung or killed else code, time.monotonic() - started, calls, text)


def _be_child(function: Callable[[], None], log: Path, count: Path, die_at: int | None) -> None:
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = os.fdopen(descriptor, "w", buffering=1)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    system = disk.file_system = CountingDisk(die_at)
    function()
    count.write_text(str(system.count))
