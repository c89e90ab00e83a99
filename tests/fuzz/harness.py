"""Runs targets in worker processes, watches over them, and adds up what they tell."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

from tests.fuzz.finding import Finding
from tests.fuzz.target import Target
from tests.fuzz.worker import STATE, Tally, random_for, serve

# How long a worker serves one target before another target has its turn.
_SLICE_SECONDS = 8.0
# Slices begin at multiples of this, so that no two of them try the same inputs.
_INPUTS_OF_A_SLICE = 10**7
_fork = multiprocessing.get_context("fork")


class Worker:
    """One process that tries inputs of one target.

    Args:
        target: A prepared target.
        directory: Where it may write.
        inputs: Numbers of the inputs.
        seed: Seed of the run.
        seconds: When to stop, though inputs are left.
    """

    def __init__(self, target: Target, directory: Path, inputs: range, seed: int, seconds: float = 1e9):
        self.target, self.directory, self.seed = target, directory, seed
        self._findings: list[Finding] = []
        self._state = mmap.mmap(-1, STATE.size)
        STATE.pack_into(self._state, 0, inputs.start, time.monotonic(), 0, 0, 0, 0)
        self.receiver, sender = _fork.Pipe(duplex=False)
        arguments = (target, directory, inputs, seed, seconds, sender, self._state)
        self._process = _fork.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        sender.close()

    def result(self) -> Tally | None:
        """Return the tally of a worker that has ended or died, None while it works; one that is stuck is killed."""
        while self.receiver.poll():
            try:
                finding = self.receiver.recv()
            except EOFError:
                self._process.join()
                return self._died("crash", f"the process ended with {self._process.exitcode}")
            if finding is None:
                self._process.join()
                return self._tally()
            self._findings.append(finding)
        # What blocks in C code is not interrupted by the worker's own alarm.
        _, began, *_ = STATE.unpack_from(self._state, 0)
        if time.monotonic() - began > 1.5 * self.target.limit_seconds + 2:
            self._process.kill()
            self._process.join()
            return self._died("hang", f"more than {self.target.limit_seconds:g} s in code that no signal stops")
        return None

    def _tally(self) -> Tally:
        next_index, _, *counts = STATE.unpack_from(self._state, 0)
        return Tally(*counts, next_index, {finding.key: finding for finding in self._findings})

    def _died(self, kind: str, text: str) -> Tally:
        tally = self._tally()
        output = (self.directory / "output").read_text(encoding="utf-8", errors="replace")
        given = self.target.mutate(random_for(self.target, self.seed, tally.next_index))
        finding = Finding(self.target.name, self.seed, tally.next_index, kind, text, output, given)
        tally.findings.setdefault(finding.key, finding)
        tally.broken += 1
        tally.next_index += 1
        return tally


@contextmanager
def memory_directory() -> Iterator[Path]:
    """Make a directory in memory where the system has one, and remove it at the end."""
    in_memory = Path("/dev/shm")
    parent = in_memory if os.access(in_memory, os.W_OK) else None
    directory = Path(tempfile.mkdtemp(prefix="fuzz-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def run_count(target: Target, directory: Path, inputs: range, seed: int) -> Tally:
    """Try a fixed number of inputs, however many workers die of them.

    Args:
        target: A prepared target.
        directory: Where it may write.
        inputs: Numbers of the inputs.
        seed: Seed of the run.
    """
    total = Tally(next_index=inputs.start)
    while total.next_index < inputs.stop:
        worker = Worker(target, directory, range(total.next_index, inputs.stop), seed)
        total.add(_result(worker))
    return total


def _result(worker: Worker) -> Tally:
    while (tally := worker.result()) is None:
        wait([worker.receiver], timeout=1.0)
    return tally


def run_seconds(
    targets: Sequence[Target],
    directory: Path,
    seconds: float,
    jobs: int,
    seed: int,
    report: Callable[[Target, Tally, Tally], None],
) -> dict[str, Tally]:
    """Try inputs for some time, each target for its share of it.

    Args:
        targets: Prepared targets.
        directory: Where they may write.
        seconds: How long.
        jobs: Processes side by side.
        seed: Seed of the run.
        report: Called with a target, its tally and what the last worker added to it.

    Returns:
        The tallies by name.
    """
    totals = {target.name: Tally() for target in targets}
    given_seconds = {target.name: 0.0 for target in targets}
    running: dict[int, Worker] = {}
    slices = 0
    slice_seconds = min(_SLICE_SECONDS, seconds * jobs / (2 * len(targets)))  # so that each target has its turn
    end = time.monotonic() + seconds
    while time.monotonic() < end or running:
        for job in set(range(jobs)) - running.keys() if time.monotonic() < end else ():
            target = min(targets, key=lambda each: given_seconds[each.name] / each.share)
            length = min(slice_seconds, end - time.monotonic())
            given_seconds[target.name] += length
            inputs = range(slices * _INPUTS_OF_A_SLICE, (slices + 1) * _INPUTS_OF_A_SLICE)
            running[job] = Worker(target, directory / f"job-{job}" / target.name, inputs, seed, length)
            slices += 1
        wait([worker.receiver for worker in running.values()], timeout=1.0)
        for job, worker in list(running.items()):
            tally = worker.result()
            if tally is not None:
                del running[job]
                totals[worker.target.name].add(tally)
                report(worker.target, totals[worker.target.name], tally)
    return totals
