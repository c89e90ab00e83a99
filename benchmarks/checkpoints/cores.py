"""How fast a large checkpoint is made small and loaded on one core and on two, and what that writes and takes.

Run `python -m benchmarks.checkpoints.cores`; it writes `benchmarks/results/checkpoint_cores.json` within minutes. The
checkpoint has the shapes of a Llama and 1.3 GB of random weights and moments, whose bits are spread like those of real
ones. Everything is done in turn for several rounds, and a figure is the best of its rounds: on a shared machine others
make a round slower and never faster. Threads are limited by the cores that the process may use, as for anyone.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import cpu_name, versions
from benchmarks.memory import Peak
from hf_trainweights.checkpoint import compress_directory
from hf_trainweights.checkpoint.encoded.reader import leave_undecoded
from hf_trainweights.checkpoint.run.checkpoints import OPTIMIZER_NAME
from hf_trainweights.checkpoint.run.weights import WEIGHTS_NAME
from hf_trainweights.files.atomic import FREEING_THREAD

RESULTS = Path(__file__).parent.parent / "results" / "checkpoint_cores.json"
MODES = ("lossless", "near-lossless")
CORES = (1, 2)
ROUNDS = 5
SAVES = 4
LAYERS, HIDDEN, INNER, WORDS = 6, 1024, 2816, 32000
# On paper: parameters, and ranks that share a save.
PLANS = {"7B on one node": (6_738_000_000, 1), "70B on 64 ranks": (70_554_000_000, 64)}
_BYTES_PER_PARAMETER = 12

State = dict[str, Any]


def write_report(results: Path, measure: Callable[[Path], dict[str, Any]]) -> None:
    """Measure on one thread of torch, with a directory for files that is removed, and write and print the figures."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        report = measure(Path(directory))
    results.write_text(json.dumps(report, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


def measure(root: Path) -> dict[str, Any]:
    """Return all figures; files go to `root`."""
    weights, optimizer = make_state()
    names = dict(enumerate(weights))
    plain_bytes = sum(tensor.nbytes for tensor in weights.values()) * 3
    found: dict[str, list[tuple[float, float]]] = {}
    modes = {mode: measure_saves(root, mode, weights, optimizer, names) for mode in MODES}
    for _ in range(ROUNDS):
        path = root / "checkpoint-1"
        _time(found, "save", partial(save, path, weights, optimizer))
        _time(found, "load", partial(load, path))
        for mode in MODES:
            for cores in CORES:
                save(path, weights, optimizer)
                compress = partial(compress_directory, path, mode=mode, optimizer_names=names)
                with only(cores):
                    _time(found, f"{mode}, {cores}", compress)
                    _time(found, f"load {mode}, {cores}", partial(load, path))
                    _time(found, f"read {mode}, {cores}", partial(read, path))
        shutil.rmtree(path)
    best = {name: [min(each) for each in zip(*rounds, strict=True)] for name, rounds in found.items()}
    for mode in MODES:
        modes[mode] |= _speeds(best, mode, plain_bytes)
    save_seconds, load_seconds = best["save"][0], best["load"][0]
    return {
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "is_shared": True, "load": os.getloadavg()[2]},
        "versions": versions("zstandard"),
        "plain_bytes": plain_bytes,
        "largest_tensor_bytes": max(tensor.nbytes for tensor in weights.values()),
        "save_gb_per_cpu_second": plain_bytes / 1e9 / save_seconds,
        "load_gb_per_cpu_second": plain_bytes / 1e9 / load_seconds,
        "load_gb_per_second": plain_bytes / 1e9 / best["load"][1],
        "modes": modes,
        "plans": {name: _plan(modes, *sizes) for name, sizes in PLANS.items()},
    }


def make_state(layers: int = LAYERS, words: int = WORDS) -> tuple[State, State]:
    """Return weights and the state of AdamW, the same ones each time, for so many layers and rows of the embedding."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (words, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(layers):
        shapes |= {f"layers.{layer}.{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "o")}
        shapes |= {f"layers.{layer}.{name}": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"layers.{layer}.down": (HIDDEN, INNER), f"layers.{layer}.norm": (HIDDEN,)}
    weights = {name: normal(*shape) * 0.02 for name, shape in shapes.items()}
    state = {}
    for index, shape in enumerate(shapes.values()):
        rows, columns = normal(shape[0], *[1] * (len(shape) - 1)), normal(shape[-1])
        squares = (rows + columns + normal(*shape) * 0.7 - 34).exp2()
        moments = {"exp_avg": normal(*shape) * squares.sqrt() * 0.3, "exp_avg_sq": squares}
        state[index] = {"step": torch.tensor(100.0), **moments}
    (group,) = torch.optim.AdamW([torch.zeros(1)]).state_dict()["param_groups"]
    return weights, {"state": state, "param_groups": [group | {"params": [*state]}]}


def save(path: Path, weights: State, optimizer: State) -> None:
    """Write a plain checkpoint in the place of what is there, and force it to the disk."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    for name, tree in ((WEIGHTS_NAME, weights), (OPTIMIZER_NAME, optimizer)):
        with (path / name).open("wb") as file:
            torch.save(tree, file)
            file.flush()
            os.fsync(file.fileno())


def load(path: Path, *, mmap: bool | None = None) -> None:
    """Load both files of a checkpoint as anyone would, or mapped into memory instead of read."""
    for name in (WEIGHTS_NAME, OPTIMIZER_NAME):
        torch.load(path / name, weights_only=True, mmap=mmap)


def read(path: Path) -> None:
    """Have torch.load read both files of a small checkpoint, and decode nothing."""
    token = leave_undecoded.set(True)
    try:
        load(path)
    finally:
        leave_undecoded.reset(token)


def measure_saves(root: Path, mode: str, weights: State, optimizer: State, names: dict[int, str]) -> dict[str, Any]:
    """Return what several saves of a run write over the plain ones, how small each becomes, and the memory it takes."""
    plain_bytes = written_bytes = 0
    ratios, peaks = [], []
    for number in range(1, SAVES + 1):
        path = root / mode / f"checkpoint-{number}"
        before = _written_bytes()
        save(path, {name: tensor + 1e-4 * number * tensor.roll(1) for name, tensor in weights.items()}, optimizer)
        plain_bytes += _written_bytes() - before
        plain = sum(file.stat().st_size for file in path.iterdir())
        with Peak() as peak:
            compress_directory(path, mode=mode, optimizer_names=names)
        written_bytes += _written_bytes() - before
        ratios.append(plain / sum(file.stat().st_size for file in path.iterdir() if file.suffix != ".anchor"))
        peaks.append(peak.increase_bytes)
    shutil.rmtree(root / mode)
    return {"written": written_bytes / plain_bytes, "ratios": ratios, "peak_bytes": peaks}


@contextlib.contextmanager
def only(cores: int) -> Iterator[None]:
    """Leave the process so many cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _time(found: dict[str, list[tuple[float, float]]], name: str, work: Callable[[], Any]) -> None:
    start, cpu_start = time.perf_counter(), time.process_time()
    work()
    seconds = time.perf_counter() - start
    for thread in threading.enumerate():
        if thread.name == FREEING_THREAD:
            thread.join()
    found.setdefault(name, []).append((time.process_time() - cpu_start, seconds))


def _written_bytes() -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))


def _speeds(best: dict[str, list[float]], mode: str, plain_bytes: int) -> dict[str, Any]:
    """Return speeds in GB per CPU second on one core, how many times faster two are, and what no code can pass.

    Two cores could at most share all that one computes, and would wait for the disk as long; and a load takes at least
    the time in which torch.load reads the bytes, on one core.
    """
    one, two = best[f"{mode}, 1"], best[f"{mode}, 2"]
    load_one, load_two = best[f"load {mode}, 1"], best[f"load {mode}, 2"]
    return {
        "encode_gb_per_cpu_second": plain_bytes / 1e9 / one[0],
        "encode_speedup_of_two_cores": one[1] / two[1],
        "encode_speedup_at_most": one[1] / (one[0] / 2 + max(one[1] - one[0], 0.0)),
        "encode_cpu_of_two_cores": two[0] / one[0],
        "load_over_plain": best["load"][0] / load_one[0],
        "load_over_plain_on_two_cores": best["load"][1] / load_two[1],
        "load_cpu_of_two_cores": load_two[0] / load_one[0],
        "read_over_plain": best["load"][0] / best[f"read {mode}, 1"][0],
        "read_over_plain_on_two_cores": best["load"][1] / best[f"read {mode}, 2"][1],
    }


def _plan(modes: dict[str, Any], parameters: int, ranks: int) -> dict[str, Any]:
    """Return on paper what a save costs each rank: bytes, and seconds of one core."""
    plain_bytes = parameters * _BYTES_PER_PARAMETER / ranks
    speeds = {mode: row["encode_gb_per_cpu_second"] for mode, row in modes.items()}
    return {
        "plain_bytes": plain_bytes,
        "cpu_seconds": {mode: plain_bytes / 1e9 / speed for mode, speed in speeds.items()},
    }


if __name__ == "__main__":
    write_report(RESULTS, measure)
