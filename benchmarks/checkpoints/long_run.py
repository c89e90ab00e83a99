"""A long run whose process dies in the middle: bytes and CPU of its saves, and how it ends beside one without breaks.

Run `python -m benchmarks.checkpoints.long_run [--seeds N]`; it writes `benchmarks/results/checkpoint_long_run.json` and
takes ten minutes of one core for each seed. A small Llama trains for 2,000 steps in a plain loop, with AdamW and a
falling rate, and saves 20 times. The last three saves are kept. Halfway between two saves the process ends without
another save. A second process goes on from the last save, and does the steps since then again. The yardstick is a run
that saves with `torch.save` and does not end early. One more row goes on from exact weights that are moved by one unit
in the last place: what training makes of that, no coder can avoid.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.checkpoints.__main__ import merge
from benchmarks.checkpoints.optimizers import small_llama, text_rows
from benchmarks.checkpoints.protocol import MODES, in_new_process
from benchmarks.machine import cpu_name
from hf_trainweights.checkpoint import CheckpointManager

RESULTS = Path(__file__).parent.parent / "results" / "checkpoint_long_run.json"
SEEDS = (0, 1, 2)
STEPS, SAVE_STEPS, KEPT_SAVES = 2000, 100, 3
# Between two saves: what came after the last one is done again.
DIES_AT = 1050
RESUMES_AT = DIES_AT // SAVE_STEPS * SAVE_STEPS
_LEARNING_RATE, _WARMUP_STEPS = 1e-3, 50
_BATCH, _HELD_OUT_ROWS = 4, 256
# The loss of a batch is noisy, so the end is a mean.
_LAST_STEPS = 100

NEIGHBOURS = "1 ulp"

Found = dict[str, Any]
Steps = Iterator[tuple[int, Tensor]]


def measure(mode: str, seed: int) -> Found:
    """Train with a mode of checkpoints until the process dies, and with another process to the end.

    Args:
        mode: A mode of `Policy`, or `NEIGHBOURS`.
        seed: For weights and data.

    Returns:
        `written_bytes` and `cpu_seconds` of all saves, `training_cpu_seconds`, `kept_bytes` on the disk at the end,
        `losses` by step from the resume on, and the `held_out` loss at the end.
    """
    with tempfile.TemporaryDirectory() as directory:
        first = in_new_process(_train_managed, mode, seed, Path(directory), DIES_AT)
        second = in_new_process(_train_managed, mode, seed, Path(directory), STEPS)
        added = {name: first[name] + second[name] for name in ("written_bytes", "cpu_seconds", "training_cpu_seconds")}
        return {**second, **added, "kept_bytes": _kept_bytes(Path(directory))}


def measure_without_breaks(seed: int) -> Found:
    """Train in one go and save with `torch.save`; the result is that of `measure`."""
    with tempfile.TemporaryDirectory() as directory:
        found = in_new_process(_train_plainly, seed, Path(directory))
        return {**found, "kept_bytes": _kept_bytes(Path(directory))}


def _train_managed(mode: str, seed: int, directory: Path, stop: int) -> Found:
    torch.set_num_threads(1)
    model, optimizer, scheduler = _objects(seed)
    rows, held_out = _data(seed)
    manager_mode = "lossless" if mode == NEIGHBOURS else mode
    meter, losses = _Meter(), {}
    checkpoints = CheckpointManager(directory, mode=manager_mode, every_steps=SAVE_STEPS, keep_last=KEPT_SAVES)
    with contextlib.suppress(_DeathError), checkpoints as manager:
        steps = manager.steps(rows, model, optimizer, scheduler)
        if mode == NEIGHBOURS and stop == STEPS:
            steps = _moved(steps, model)
        losses = _train(meter.around(steps), stop, model, optimizer, scheduler)
        if stop < STEPS:
            raise _DeathError
    return meter.found(losses, model, held_out)


def _train_plainly(seed: int, directory: Path) -> Found:
    torch.set_num_threads(1)
    model, optimizer, scheduler = _objects(seed)
    rows, held_out = _data(seed)
    meter = _Meter()

    def saved() -> Steps:
        for step, batch in enumerate(rows, 1):
            yield step, batch
            if step % SAVE_STEPS == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, directory / str(step))
                (directory / str(step - KEPT_SAVES * SAVE_STEPS)).unlink(missing_ok=True)

    losses = _train(meter.around(saved()), STEPS, model, optimizer, scheduler)
    return meter.found(losses, model, held_out)


def _train(steps: Steps, stop: int, model: nn.Module, optimizer: Any, scheduler: Any) -> dict[int, float]:
    losses = {}
    for step, batch in steps:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
        if step == stop < STEPS:
            break
    return losses


def _moved(steps: Steps, model: nn.Module) -> Steps:
    """Move each weight to a neighbouring number once it is restored."""
    first = next(steps)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            upwards = torch.rand(weight.shape, generator=generator) < 0.5
            weight.copy_(torch.nextafter(weight, torch.where(upwards, torch.inf, -torch.inf)))
    return itertools.chain([first], steps)


class _DeathError(Exception):
    """Leaves a manager's block as a crash does: without a save."""


class _Meter:
    """Counts CPU and bytes of what happens between steps, which is a save or next to nothing."""

    def __init__(self) -> None:
        self._saving_seconds, self._written_bytes = 0.0, 0
        self._start_seconds = time.process_time()

    def around(self, steps: Steps) -> Steps:
        """Yield the steps; all that is done between them counts."""
        while True:
            start = self.begin()
            step = next(steps, None)
            self.end(start)
            if step is None:
                return
            yield step

    def begin(self) -> tuple[float, int]:
        """Return where the counters are."""
        return time.process_time(), _written_bytes()

    def end(self, start: tuple[float, int]) -> None:
        """Add what was done since `begin`."""
        self._saving_seconds += time.process_time() - start[0]
        self._written_bytes += _written_bytes() - start[1]

    def found(self, losses: dict[int, float], model: nn.Module, held_out: Tensor) -> Found:
        """Return what was measured until now, and how good the model is."""
        training_seconds = time.process_time() - self._start_seconds - self._saving_seconds
        with torch.no_grad():
            loss = model(input_ids=held_out, labels=held_out).loss.item()
        return {
            "written_bytes": self._written_bytes,
            "cpu_seconds": self._saving_seconds,
            "training_cpu_seconds": training_seconds,
            "losses": losses,
            "held_out": loss,
        }


def _written_bytes() -> int:
    """Return how many bytes this process has written by now, also those that a later save removed from the disk."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar:"))


def _kept_bytes(directory: Path) -> int:
    files = [path.stat() for path in directory.rglob("*") if path.is_file()]
    return sum({status.st_ino: status.st_size for status in files}.values())


def _objects(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, LambdaLR]:
    model = small_llama(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)

    def rate(step: int) -> float:
        return min((step + 1) / _WARMUP_STEPS, 0.05 + 0.95 * math.cos(math.pi / 2 * step / STEPS) ** 2)

    return model, optimizer, LambdaLR(optimizer, rate)


def _data(seed: int) -> tuple[Tensor, Tensor]:
    """Return batches in their order, and rows that are held out."""
    count = STEPS * _BATCH
    rows = text_rows(count + _HELD_OUT_ROWS)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return rows[order].view(STEPS, _BATCH, -1), rows[count:]


def compare(found: Found, straight: Found) -> Found:
    """Return the figures of a run beside those of the run without breaks."""
    steps = range(RESUMES_AT + 1, STEPS + 1)
    differences = [found["losses"][step] - straight["losses"][step] for step in steps]
    return {
        "written": found["written_bytes"] / straight["written_bytes"],
        "written_bytes": found["written_bytes"],
        "kept": found["kept_bytes"] / straight["kept_bytes"],
        "cpu_share": found["cpu_seconds"] / found["training_cpu_seconds"],
        "loss": statistics.fmean(found["losses"][step] for step in steps[-_LAST_STEPS:]),
        "loss_difference": statistics.fmean(differences[-_LAST_STEPS:]),
        "mean_absolute_difference": statistics.fmean(map(abs, differences)),
        "held_out": found["held_out"],
        "held_out_difference": found["held_out"] - straight["held_out"],
    }


def main() -> None:
    """Measure each mode and store the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints.long_run", description=__doc__)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many seeds")
    arguments = parser.parse_args()
    merge(RESULTS, ("machine",), {"cpu": cpu_name(), "cores": os.cpu_count(), "is_shared": True})
    for seed in SEEDS[: arguments.seeds]:
        straight = measure_without_breaks(seed)
        runs: dict[str, Callable[[], Found]] = {"no break": lambda straight=straight: straight}
        runs |= {mode: lambda mode=mode, seed=seed: measure(mode, seed) for mode in (*MODES, NEIGHBOURS)}
        for mode, run in runs.items():
            row = compare(run(), straight)
            merge(RESULTS, ("seeds", str(seed), mode), row)
            print(f"seed {seed}, {mode}: {row}", flush=True)


if __name__ == "__main__":
    main()
