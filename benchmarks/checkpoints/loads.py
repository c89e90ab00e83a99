"""Where the time of a load goes: reading the file, the first writes to new memory, and the codecs.

Run `python -m benchmarks.checkpoints.loads`; it writes `benchmarks/results/checkpoint_loads.json` within minutes. A
checkpoint of random weights and moments is loaded plainly and in each mode, by `torch.load`, on one core. Everything is
done in turn for several rounds, and a figure is the least CPU time of its rounds. Reading is torch.load without the
codecs. A mapped load is `torch.load(mmap=True)`. Writing fills as many new bytes as the tensors have. A load that is
repeated may get memory back that the one before has freed. The first load of a process, as of a resume, gets none, so
it is measured in processes of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checkpoints.cores import MODES, load, make_state, only, read, save, write_report
from benchmarks.machine import cpu_name, versions
from hf_trainweights.checkpoint import compress_directory

RESULTS = Path(__file__).parent.parent / "results" / "checkpoint_loads.json"
ROUNDS = 9
LAYERS, WORDS = 2, 8000


def measure(root: Path) -> dict[str, Any]:
    """Return CPU seconds of each part of a load; files go to `root`."""
    paths = {mode: root / mode / "checkpoint-1" for mode in ("plain", *MODES)}
    sizes = _in_child(partial(_write_all, paths))  # this process has no freed memory that a fork could use
    loads: dict[str, Callable[[], None]] = {mode: partial(load, path) for mode, path in paths.items()}
    loads |= {f"mapped {mode}": partial(load, paths[mode], mmap=True) for mode in MODES}
    with only(1):
        rounds = [{name: _in_child(partial(_cpu_seconds, work)) for name, work in loads.items()} for _ in range(ROUNDS)]
    first = {name: min(each[name] for each in rounds) for name in loads}
    parts = {**loads}
    parts |= {f"read {mode}": partial(read, paths[mode]) for mode in MODES}
    parts["write"] = partial(_write, sizes)
    seconds = dict.fromkeys(parts, float("inf"))
    with only(1):
        for _ in range(ROUNDS):
            for name, work in parts.items():
                seconds[name] = min(seconds[name], _cpu_seconds(work))
    return {
        "machine": {"cpu": cpu_name(), "is_shared": True, "load": os.getloadavg()[2]},
        "versions": versions("zstandard"),
        "plain_bytes": sum(sizes),
        "plain_seconds": seconds["plain"],
        "first_plain_seconds": first["plain"],
        "write_seconds": seconds["write"],
        "modes": {
            mode: {
                "load": seconds[mode],
                "read": seconds[f"read {mode}"],
                "first": first[mode],
                "mapped": seconds[f"mapped {mode}"],
                "first_mapped": first[f"mapped {mode}"],
            }
            for mode in MODES
        },
    }


def _write_all(paths: dict[str, Path]) -> list[int]:
    """Write a checkpoint plainly and in each mode, and return the bytes of each of its tensors."""
    weights, optimizer = make_state(LAYERS, WORDS)
    for mode, path in paths.items():
        save(path, weights, optimizer)
        if mode in MODES:
            compress_directory(path, mode=mode, optimizer_names=dict(enumerate(weights)))
    return [tensor.nbytes for tensor in weights.values() for _ in range(3)]


def _in_child(work: Callable[[], Any]) -> Any:
    """Return the result of `work` in a fork of this process."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(work).result()


def _write(sizes: list[int]) -> None:
    arrays = [np.empty(size, np.uint8) for size in sizes]  # all at once, as a load returns them
    for array in arrays:
        array.fill(1)


def _cpu_seconds(work: Callable[[], None]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    write_report(RESULTS, measure)
