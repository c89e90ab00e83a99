"""Runs a function in several processes that PyTorch's distributed package joins over gloo, one for each rank."""

from __future__ import annotations

import gc
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fork_server import CONTEXT

# In one of ten thousand groups gloo loses a connection while it makes them ("Connection closed by peer").
_ATTEMPTS, _JOINED = 3, "joined"


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Args:
        value: What the function returned.
        error: The exception that it raised, or None.
        text: Its traceback, or what else is known.
    """

    value: Any = None
    error: Exception | None = None
    text: str = ""


def outcomes_of_ranks(
    world_size: int, body: Callable[..., Any], *args: Any, timeout_seconds: float = 120.0
) -> list[Outcome]:
    """Return how `body(rank, *args)` ended in each of `world_size` processes that share a process group.

    Args:
        world_size: Number of processes.
        body: A function of a module, so that the processes can import it.
        args: What it gets after its rank; pickled.
        timeout_seconds: After this time the processes are killed, and those that had not ended say so.
    """
    for _ in range(_ATTEMPTS - 1):
        outcomes, has_joined = _attempt(world_size, body, args, timeout_seconds)
        if has_joined:
            return outcomes
    return _attempt(world_size, body, args, timeout_seconds)[0]


def _attempt(
    world_size: int, body: Callable[..., Any], args: tuple[Any, ...], timeout_seconds: float
) -> tuple[list[Outcome], bool]:
    """Return how the ranks ended, and false if no group was made of them; one that hung is no such case."""
    with tempfile.TemporaryDirectory() as directory:
        at = Path(directory)
        processes = [
            CONTEXT.Process(target=_run, args=(rank, world_size, at, body, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_seconds
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        alive = [process.is_alive() for process in processes]
        for process in processes:
            process.kill()
            process.join()
        outcomes = [_outcome(at / str(rank), alive[rank], processes[rank].exitcode) for rank in range(world_size)]
        return outcomes, any(alive) or (at / _JOINED).exists()


def run_ranks(world_size: int, body: Callable[..., Any], *args: Any, timeout_seconds: float = 120.0) -> list[Any]:
    """Return what `body(rank, *args)` returned in each process; see `outcomes_of_ranks`.

    Raises:
        AssertionError: A rank raised, was killed or hung; with the text of all that did.
    """
    outcomes = outcomes_of_ranks(world_size, body, *args, timeout_seconds=timeout_seconds)
    failures = [f"rank {rank}: {outcome.text}" for rank, outcome in enumerate(outcomes) if outcome.text]
    assert not failures, "\n".join(failures)
    return [outcome.value for outcome in outcomes]


def _run(rank: int, world_size: int, directory: Path, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    gc.freeze()  # what the server has imported; to look through it would copy its memory
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{directory}/store", rank=rank, world_size=world_size)
    dist.barrier()
    (directory / _JOINED).touch()
    try:
        outcome = Outcome(body(rank, *args))
    except Exception as error:
        text = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # some exceptions take arguments that their class does not
            error = RuntimeError(text)
        outcome = Outcome(error=error, text=text)
    part = directory / f"{rank}.part"
    part.write_bytes(pickle.dumps(outcome))
    part.rename(directory / str(rank))
    if outcome.error is None:
        dist.destroy_process_group()


def _outcome(path: Path, was_alive: bool, exit_code: int | None) -> Outcome:
    if path.exists():
        return pickle.loads(path.read_bytes())
    return Outcome(text="it hung until it was killed" if was_alive else f"it ended with exit code {exit_code}")
