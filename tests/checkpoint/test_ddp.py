"""DDP on two ranks, of a Trainer and of a plain loop: the first rank writes, each gets its own random state back."""

from __future__ import annotations

import os
import random
import signal
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoint.trainers import STEPS, assert_equal, trainer_of, weights
from covering import exhaustive
from ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
from trees import fingerprint

from hf_trainweights import TrainWeightsCheckpointCallback
from hf_trainweights.checkpoint import CheckpointManager, verify_checkpoint
from hf_trainweights.checkpoint.loop import manager as manager_module
from hf_trainweights.checkpoint.loop.progress import rng_state
from hf_trainweights.checkpoint.whole.rewriting import WholeLayout
from hf_trainweights.errors import ConfigError

pytestmark = pytest.mark.slow  # each trains on two ranks

RANKS = 2

stock_trainer_resumes = pytest.mark.skipif(
    transformers.__version__ < "5.18", reason="this Trainer asks torch.load for cpu:0, which torch does not know"
)


def with_dropout() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, attention_dropout=0.3, **sizes))


class OwnSeed(TrainerCallback):
    """Gives each rank random numbers of its own, which a Trainer does not, after the data were shuffled."""

    def __init__(self, rank: int):
        self.rank = rank

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            torch.manual_seed(100 + self.rank)


def train(
    rank: int, out: Path, resume: str | None = None, *, callback: Any = TrainWeightsCheckpointCallback, **options: Any
) -> tuple[dict[int, float], Any, list[str]]:
    """Train by a Trainer on all ranks; return the losses by step, the weights, and what this rank made small."""
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # the group is there already
    written: list[str] = []
    original: Any = WholeLayout.compress

    def watched(layout: WholeLayout, *args: Any) -> Any:
        written.append(layout.path.name)
        return original(layout, *args)

    WholeLayout.compress = watched
    callbacks = (OwnSeed(rank), callback())
    trainer, losses = trainer_of(out, *callbacks, model=with_dropout(), save_steps=3, **options)
    trainer.train(resume_from_checkpoint=resume)
    return losses.by_step, weights(trainer), written


def train_stock(rank: int, out: Path, resume: str | None = None, **options: Any) -> Any:
    """Train likewise, without this package's callback."""
    return train(rank, out, resume, callback=TrainerCallback, **options)


@stock_trainer_resumes
@pytest.mark.parametrize("options", exhaustive({}, {"save_on_each_node": True}), ids=["plain", "each node"])
def test_the_first_rank_makes_checkpoints_small_and_both_resume_exactly(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    whole = run_ranks(RANKS, partial(train, **options), tmp_path)
    assert [written for *_, written in whole] == [["checkpoint-3", "checkpoint-6", "checkpoint-8"], []]
    small = tmp_path / "checkpoint-3"
    assert verify_checkpoint(small).ok
    first, second = (torch.load(small / f"rng_state_{rank}.pth", weights_only=False)["cpu"] for rank in range(RANKS))
    assert not torch.equal(first, second)
    resumed = run_ranks(RANKS, partial(train, **options), tmp_path, str(small))
    for rank in range(RANKS):
        assert resumed[rank][0] == {step: whole[rank][0][step] for step in whole[rank][0] if step > 3}
        assert_equal(resumed[rank][1], whole[rank][1])
    assert len(whole[0][0]) == STEPS


@pytest.mark.exhaustive
@stock_trainer_resumes
def test_with_dispatched_batches_a_resume_is_that_of_a_trainer_without_the_callback(tmp_path: Path) -> None:
    # A Trainer's own resume gives each rank other random numbers here than the whole run had.
    options = {"accelerator_config": {"dispatch_batches": True}}
    small, plain = partial(train, **options), partial(train_stock, **options)
    found = []
    for run, out in ((small, tmp_path / "small"), (plain, tmp_path / "plain")):
        run_ranks(RANKS, run, out)
        found.append(run_ranks(RANKS, run, out, str(out / "checkpoint-3")))
    for mine, stock in zip(*found, strict=True):
        assert mine[0] == stock[0]
        assert_equal(mine[1], stock[1])
    assert verify_checkpoint(tmp_path / "small" / "checkpoint-3").ok


class Loop:
    """A plain loop under DDP that notes its losses; batches, dropout and place in the loader differ by rank."""

    def __init__(self, rank: int):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(16, 80), nn.Dropout(0.3), nn.Linear(80, 16))
        self.model = nn.parallel.DistributedDataParallel(layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(100 + rank)
        data = TensorDataset(torch.randn(24, 16, generator=torch.Generator().manual_seed(1)))
        sampler = DistributedSampler(data, RANKS, rank)
        self.loader = DataLoader(data, batch_size=2, sampler=sampler)
        self.losses: list[tuple[int, float]] = []

    def __call__(self, root: Path, stop: int) -> Any:
        with CheckpointManager(root, every_steps=4, keep_last=2) as manager:
            for _ in range(2):
                for step, (x,) in manager.steps(self.loader, self.model, self.optimizer, None, self.scaler):
                    self.optimizer.zero_grad()
                    loss = self.model(x).square().mean()
                    self.scaler.scale(loss).backward()
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
                    self.losses.append((step, loss.item()))
                    if step == stop:
                        return self.outcome()
        return self.outcome()

    def outcome(self) -> Any:
        parts = (self.model, self.optimizer, self.scaler)
        return self.losses, fingerprint([*(part.state_dict() for part in parts), rng_state()])


def loop(rank: int, root: Path, stop: int = 99) -> Any:
    """Run the loop; return its losses, its state, and what this rank wrote."""
    written: list[str] = []
    original = manager_module.save_training_state

    def watched(checkpoint: Any, path: Path, *arguments: Any, **choices: Any) -> Any:
        written.append(path.name)
        return original(checkpoint, path, *arguments, **choices)

    manager_module.save_training_state = watched
    return *Loop(rank)(root, stop), written


def test_a_managed_loop_on_two_ranks_goes_on_exactly(tmp_path: Path) -> None:
    whole = run_ranks(RANKS, loop, tmp_path / "whole")
    assert [written for *_, written in whole] == [["checkpoint-4", "checkpoint-8", "checkpoint-12"], []]
    assert whole[0][0] != whole[1][0]
    first = run_ranks(RANKS, loop, tmp_path / "parts", 5)
    second = run_ranks(RANKS, loop, tmp_path / "parts")
    for rank in range(RANKS):
        assert first[rank][0] + second[rank][0] == whole[rank][0]
        assert second[rank][1] == whole[rank][1]
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["checkpoint-12", "checkpoint-8"]


def test_a_managed_run_resumes_on_its_own_number_of_ranks_only(tmp_path: Path) -> None:
    run_ranks(RANKS, loop, tmp_path, 5)
    with (
        pytest.raises(ConfigError, match="expected a checkpoint of 1 ranks, found one of 2"),
        CheckpointManager(tmp_path) as manager,
    ):
        next(iter(manager.steps([1], nn.Linear(1, 1))))
    assert verify_checkpoint(tmp_path / "checkpoint-5").ok


def terminated(rank: int, root: Path) -> Any:
    """Run the loop and send SIGTERM to the second rank in its third step."""
    run = Loop(rank)
    whole = run.loader

    def batches() -> Any:
        for number, batch in enumerate(whole, 1):
            if rank == 1 and number == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    run.loader = batches()
    try:
        run(root, 99)
    except SystemExit as error:
        return error.code, run.losses[-1][0]
    return None


def test_a_signal_to_one_rank_ends_all_of_them_after_the_same_step(tmp_path: Path) -> None:
    assert run_ranks(RANKS, terminated, tmp_path) == [(143, 3), (143, 3)]
    assert verify_checkpoint(tmp_path / "checkpoint-3").ok
