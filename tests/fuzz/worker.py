"""The process that tries inputs: it turns whatever they do to it into findings, and dies of the rest."""

from __future__ import annotations

import faulthandler
import os
import random
import resource
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from tests.fuzz.finding import Finding
from tests.fuzz.target import (
    CANARY,
    BrokenPromiseError,
    Outcome,
    Target,
    advises_to_trust,
    is_refusal,
    our_frames,
)

# A tensor of the corpora has a few kilobytes, so whatever takes this much believed what the input said.
MEMORY_LIMIT_BYTES = 1 << 30
# What a process may map beyond what it has: an input that asks for more gets the error of a full memory.
_ADDRESS_SPACE_BYTES = 4 << 30
# Number of the input that is being tried, when it began, then the `counts` of a tally.
STATE = struct.Struct("qdqqqq")


class _HangError(BaseException):
    """Raised out of an input that takes too long; no `except Exception` stops it."""


class Problem(NamedTuple):
    """What is wrong with what an input did; as in `Finding`."""

    kind: str
    text: str
    details: str


@dataclass
class Tally:
    """What became of inputs.

    Args:
        accepted: Inputs that gave what they may give.
        refused: Inputs that gave an error as it should be.
        broken: Inputs that gave findings.
        peak_bytes: Resident memory beyond what the worker had at its start.
        next_index: The input to go on with.
        findings: The first finding of each kind and place.
    """

    accepted: int = 0
    refused: int = 0
    broken: int = 0
    peak_bytes: int = 0
    next_index: int = 0
    findings: dict[tuple[str, ...], Finding] = field(default_factory=dict)

    @property
    def inputs(self) -> int:
        """How many inputs were tried."""
        return self.accepted + self.refused + self.broken

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """The numbers without the place to go on."""
        return self.accepted, self.refused, self.broken, self.peak_bytes

    def count(self, result: Outcome | Problem) -> None:
        """Count one input."""
        self.accepted += result is Outcome.ACCEPTED
        self.refused += result is Outcome.REFUSED
        self.broken += isinstance(result, Problem)

    def add(self, part: Tally) -> None:
        """Add what another worker has found out."""
        self.accepted += part.accepted
        self.refused += part.refused
        self.broken += part.broken
        self.peak_bytes = max(self.peak_bytes, part.peak_bytes)
        self.next_index = part.next_index
        for key, finding in part.findings.items():
            self.findings.setdefault(key, finding)


def serve(
    target: Target,
    directory: Path,
    inputs: range,
    seed: int,
    seconds: float,
    connection: Connection,
    state: Any,
) -> None:
    """Try inputs, send the first finding of each kind and place at once, and None at the end.

    Args:
        target: A prepared target.
        directory: Where it may write.
        inputs: Numbers of the inputs.
        seed: Seed of the run.
        seconds: When to stop, though inputs are left.
        connection: Where the findings go.
        state: Shared memory of the parent, which outlives this process: a `STATE`.
    """
    target.directory = directory
    tally = Tally()
    with _limits(directory):
        stop, base = time.monotonic() + seconds, _peak_bytes()
        for index in inputs:
            if time.monotonic() > stop:
                break
            given = target.mutate(random_for(target, seed, index))
            STATE.pack_into(state, 0, index, time.monotonic(), *tally.counts)
            problem = _try(target, given, directory / CANARY)
            tally.peak_bytes = _peak_bytes() - base
            if tally.peak_bytes > MEMORY_LIMIT_BYTES:
                problem = Problem("memory", f"{tally.peak_bytes >> 20} MiB more than before", "")
            tally.count(problem)
            if isinstance(problem, Problem):
                finding = Finding(target.name, seed, index, *problem, given)
                if tally.findings.setdefault(finding.key, finding) is finding:
                    connection.send(finding)
            STATE.pack_into(state, 0, index + 1, time.monotonic(), *tally.counts)
            if tally.peak_bytes > MEMORY_LIMIT_BYTES:
                break  # the high-water mark never falls, so another worker goes on
    connection.send(None)


def random_for(target: Target, seed: int, index: int) -> random.Random:
    """Return the numbers that make one input, whatever other inputs were tried before."""
    return random.Random(f"{target.name} {seed} {index}")


def _try(target: Target, given: Any, canary: Path) -> Outcome | Problem:
    heard: list[str] = []
    warnings.showwarning = lambda message, *_, **__: heard.append(str(message))
    result: Outcome | Problem
    try:
        signal.setitimer(signal.ITIMER_REAL, target.limit_seconds, 1.0)
        try:
            result = target.run(given)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _HangError as error:
        text = f"more than {target.limit_seconds:g} s in {_place(error)}"
        result = Problem("hang", text, traceback.format_exc())
    except Exception as error:
        result = _judge(error)
    if canary.exists():
        canary.unlink()
        return Problem("code run", "the file that only code in the input makes", "")
    advice = next(filter(advises_to_trust, heard), None)
    return Problem("unsafe advice", advice.splitlines()[0][:200], advice) if advice else result


def _judge(error: Exception) -> Outcome | Problem:
    text = f"{type(error).__name__} in {_place(error)}: {error}".replace("\n", " ")[:300]
    details = "".join(traceback.format_exception(error))
    if isinstance(error, BrokenPromiseError):
        return Problem("broken promise", str(error), details)
    if not is_refusal(error):
        return Problem("untyped error", text, details)
    if our_frames(error) and advises_to_trust(str(error)):
        return Problem("unsafe advice", text, details)
    return Outcome.REFUSED


def _place(error: BaseException) -> str:
    return next(reversed(our_frames(error)), "no function of the package")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@contextmanager
def _limits(directory: Path) -> Iterator[None]:
    """Go to the directory, limit memory, interrupt what hangs, and keep what the process prints for the parent."""
    directory.mkdir(parents=True, exist_ok=True)
    os.chdir(directory)
    log = os.open(directory / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    faulthandler.enable(log)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _HangError

    signal.signal(signal.SIGALRM, interrupt)
    warnings.simplefilter("always")
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + _ADDRESS_SPACE_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        yield
    except BaseException:
        os.write(log, traceback.format_exc().encode())  # a fault of the fuzzer itself
        raise
