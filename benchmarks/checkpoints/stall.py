"""How long training stands still at a save, with the callback and without."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel, TrainerCallback

from benchmarks.checkpoints.protocol import in_new_process
from benchmarks.checkpoints.runs import RUNS, Run, train
from hf_trainweights import TrainWeightsCheckpointCallback

SAVE_STEPS = 8
SAVES = 6
REPEATS = 2
MODES = ("plain", "lossless", "near-lossless")


def measure_stall(root: Path) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the median standstill per save in seconds for each mode, by kind of model.

    Args:
        root: Where the runs go.

    Yields:
        Seconds by mode, in the middle of a run and at its last save.
    """
    other_names = replace(RUNS["lm"], title="GPT-NeoX", model=_gpt_neox)
    for kind, run in (("file names are module names", RUNS["lm"]), ("file names differ", other_names)):
        seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
        last: dict[str, list[float]] = {mode: [] for mode in MODES}
        for _ in range(REPEATS):
            for mode in MODES:
                *middle, end = in_new_process(_standstills, run, mode, root / "stall")
                seconds[mode] += middle
                last[mode].append(end)
        for mode in MODES:
            found = {"seconds": statistics.median(seconds[mode]), "last_save_seconds": statistics.median(last[mode])}
            yield (kind, mode), found


def _standstills(run: Run, mode: str, directory: Path) -> list[float]:
    shutil.rmtree(directory, ignore_errors=True)
    clock = _Clock()
    ours = [] if mode == "plain" else [TrainWeightsCheckpointCallback(mode=mode)]
    train(run, 0, directory, stop=SAVES * SAVE_STEPS, save_steps=SAVE_STEPS, callbacks=[clock, *ours])
    shutil.rmtree(directory)
    return clock.seconds


class _Clock(TrainerCallback):
    """From the end of a step that is saved, before any callback waits, to the begin of the next step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start: float | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_save:
            self._start = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._start is not None:
            self.seconds.append(time.perf_counter() - self._start)
            self._start = None

    on_train_end = on_step_begin


def _gpt_neox(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=8192,
            hidden_size=320,
            intermediate_size=1280,
            num_hidden_layers=6,
            num_attention_heads=5,
            max_position_embeddings=512,
            use_cache=False,
        )
    )
