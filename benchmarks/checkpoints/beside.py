"""What training loses while a thread makes a checkpoint small, as the callback of the Trainer has it done.

Run `python -m benchmarks.checkpoints.beside`; it writes `benchmarks/results/checkpoint_beside.json` within minutes.
Training takes one core and leaves one free. Its steps are timed alone, beside the thread, and beside another process
that makes the same checkpoint small: what both cost is the price of a shared machine, of its memory and its disk, and
only the rest is that of a shared process. Each thread's own CPU time is counted as well, because other guests of a
machine slow a thread down and do not make it wait.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.checkpoints.cores import MODES, make_state, save, write_report
from benchmarks.machine import cpu_name, versions
from hf_trainweights.checkpoint import compress_directory
from hf_trainweights.checkpoint.run.weights import WEIGHTS_NAME

RESULTS = Path(__file__).parent.parent / "results" / "checkpoint_beside.json"
ROUNDS = 5
ALONE_SECONDS = 4.0

Step = tuple[float, float]
"""Seconds by the clock, and of the training thread's CPU."""


def main() -> None:
    if len(sys.argv) > 1:
        compress_when_told(Path(sys.argv[1]), sys.argv[2])
    else:
        write_report(RESULTS, measure)


def measure(root: Path) -> dict[str, Any]:
    """Return what steps of each training take beside a save, relative to steps alone; files go to `root`."""
    weights, optimizer = make_state()
    names = dict(enumerate(weights))
    path = root / "checkpoint-1"
    rows: dict[str, dict[str, Any]] = {}
    for name, step in trainings().items():
        for mode in MODES:
            found: list[dict[str, list[Step]]] = []
            for _ in range(ROUNDS):
                alone = [*steps(step, _seconds(ALONE_SECONDS))]
                save(path, weights, optimizer)
                beside_thread = [
                    *steps(step, _thread(partial(compress_directory, path, mode=mode, optimizer_names=names)))
                ]
                save(path, weights, optimizer)
                beside_process = [*steps(step, _process(path, mode))]
                alone += steps(step, _seconds(ALONE_SECONDS))
                found.append({"alone": alone, "thread": beside_thread, "process": beside_process})
            rows[f"{name}, {mode}"] = _summary(found)
    return {
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "is_shared": True, "load": os.getloadavg()[2]},
        "versions": versions("zstandard"),
        "rounds": ROUNDS,
        "rows": rows,
    }


def trainings() -> dict[str, Callable[[], None]]:
    """Return a step of training by name: of a Transformer, and of a network so small that Python takes most of it."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 8192}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=6))
    tokens = torch.randint(0, 8192, (4, 64))
    small = nn.Sequential(*[layer for _ in range(20) for layer in (nn.Linear(64, 64), nn.GELU())])
    return {
        "Transformer": _training(llama, lambda: llama(input_ids=tokens, labels=tokens).loss),
        "small network": _training(small, lambda: small(torch.ones(16, 64)).square().mean()),
    }


def _training(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    return step


def steps(step: Callable[[], None], is_over: Iterator[bool]) -> Iterator[Step]:
    """Train until something is over, and yield what each step took that had ended by then."""
    for over in is_over:
        clock, cpu = time.perf_counter(), time.thread_time()
        if over:
            return
        step()
        yield time.perf_counter() - clock, time.thread_time() - cpu


def _seconds(duration_seconds: float) -> Iterator[bool]:
    end = time.perf_counter() + duration_seconds
    while True:
        yield time.perf_counter() > end


def _thread(work: Callable[[], Any]) -> Iterator[bool]:
    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        yield False
    thread.join()
    yield True


def _process(path: Path, mode: str) -> Iterator[bool]:
    command = [sys.executable, "-m", "benchmarks.checkpoints.beside", str(path), mode]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None  # both are pipes
        assert child.stdout is not None
        child.stdout.readline()  # it has imported torch
        child.stdin.write("go\n")
        child.stdin.close()
        while child.poll() is None:
            yield False
        assert child.returncode == 0
    yield True


def compress_when_told(path: Path, mode: str) -> None:
    """Make a checkpoint small in this process, as a thread that is not the main one does it, once a line comes in."""
    torch.set_num_threads(1)
    weights = torch.load(path / WEIGHTS_NAME, weights_only=True, mmap=True)
    names = dict(enumerate(weights))
    del weights
    print("ready", flush=True)
    sys.stdin.readline()
    thread = threading.Thread(target=partial(compress_directory, path, mode=mode, optimizer_names=names))
    thread.start()
    thread.join()


def _summary(rounds: list[dict[str, list[Step]]]) -> dict[str, float]:
    """Return medians over rounds: how much longer a step takes, and the share of its time in which training waited."""

    def mean(which: int, several: list[Step]) -> float:
        return sum(each[which] for each in several) / len(several)

    row: dict[str, float] = {"step_seconds": median(mean(0, each["alone"]) for each in rounds)}
    for name in ("thread", "process"):
        longer = [mean(0, each[name]) / mean(0, each["alone"]) - 1 for each in rounds]
        row |= {f"loss_beside_{name}": median(longer), f"least_loss_beside_{name}": min(longer)}
        row[f"most_loss_beside_{name}"] = max(longer)
        row[f"cpu_beside_{name}"] = median(mean(1, each[name]) / mean(1, each["alone"]) - 1 for each in rounds)
    for name in ("alone", "thread", "process"):
        row[f"waits_{name}"] = median(1 - mean(1, each[name]) / mean(0, each[name]) for each in rounds)
        row[f"longest_{name}_seconds"] = max(clock for each in rounds for clock, _ in each[name])
    return row


if __name__ == "__main__":
    main()
