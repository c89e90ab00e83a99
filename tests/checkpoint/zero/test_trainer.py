"""A Trainer with DeepSpeed on two ranks: checkpoints become small in the background, and a stock one resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.trainers import STEPS, assert_equal, build
from checkpoint.zero.deepspeed_runs import RANKS, needs_deepspeed, train
from covering import by_default
from ranks import run_ranks

from hf_trainweights import TrainWeightsCheckpointCallback, latest
from hf_trainweights.checkpoint import verify_checkpoint
from hf_trainweights.checkpoint.run.checkpoints import size_bytes
from hf_trainweights.distributed import latest_on_all_ranks

pytestmark = [pytest.mark.slow, needs_deepspeed]


def train_small(rank: int, out: Path, stage: int, mode: str = "lossless", **options: Any) -> Any:
    """Train with the callback; return also what every rank says is the newest checkpoint."""
    trained = train(rank, out, stage, (TrainWeightsCheckpointCallback(mode=mode),), **options)
    return *trained, latest_on_all_ranks(out), latest(out)


def resume(rank: int, out: Path, stage: int, step: int) -> Any:
    """Resume with a Trainer that has no callback."""
    return train(rank, out, stage, (), str(out / f"checkpoint-{step}"))


@pytest.mark.parametrize("stage", [2, 3])
def test_checkpoints_become_small_and_an_unmodified_trainer_resumes_from_them(tmp_path: Path, stage: int) -> None:
    plain = run_ranks(RANKS, train, tmp_path / "plain", stage, timeout_seconds=400)
    small = run_ranks(RANKS, train_small, tmp_path / "small", stage, timeout_seconds=400)
    newest = str(tmp_path / "small" / f"checkpoint-{STEPS}")
    assert [(agreed, own) for *_, agreed, own in small] == [(newest, newest)] * RANKS
    assert_equal(small[0][1], plain[0][1])
    for step in range(2, STEPS + 1, 2):
        checkpoint = tmp_path / "small" / f"checkpoint-{step}"
        assert verify_checkpoint(checkpoint).ok
        assert size_bytes(checkpoint) < 0.9 * size_bytes(tmp_path / "plain" / checkpoint.name)
    resumed = run_ranks(RANKS, resume, tmp_path / "small", stage, 4, timeout_seconds=400)
    assert_equal(resumed[0][1], plain[0][1])
    assert all(resumed[0][0][step] == plain[0][0][step] for step in range(5, STEPS + 1))


def with_adapters() -> Any:
    """Return the model with LoRA's adapters, which are large enough to be rounded, on a frozen base."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(build(), LoraConfig(r=64, target_modules=["q_proj", "up_proj"]))


def train_adapters(rank: int, out: Path, stage: int, mode: str | None, resume: str | None) -> tuple[Any, ...]:
    callbacks = (TrainWeightsCheckpointCallback(mode=mode),) if mode else ()
    return train(rank, out, stage, callbacks, resume, model=with_adapters())


@pytest.mark.parametrize(
    ("stage", "mode"),
    by_default([(2, "lossless")], [(2, "lossless"), (2, "near-lossless"), (3, "lossless"), (3, "near-lossless")]),
)
def test_adapters_resume_and_their_base_is_stored_once(tmp_path: Path, stage: int, mode: str) -> None:
    plain = run_ranks(RANKS, train_adapters, tmp_path / "plain", stage, None, None, timeout_seconds=400)
    run_ranks(RANKS, train_adapters, tmp_path / "small", stage, mode, None, timeout_seconds=400)
    for step in range(2, STEPS + 1, 2):
        checkpoint = tmp_path / "small" / f"checkpoint-{step}"
        assert verify_checkpoint(checkpoint).ok
        assert size_bytes(checkpoint) < (0.95 if stage == 3 else 0.9) * size_bytes(tmp_path / "plain" / checkpoint.name)
        adapters = (tmp_path / "plain" / checkpoint.name / "adapter_model.safetensors").read_bytes()
        assert mode != "lossless" or (checkpoint / "adapter_model.safetensors").read_bytes() == adapters
    resumed = run_ranks(
        RANKS,
        train_adapters,
        tmp_path / "small",
        stage,
        None,
        str(tmp_path / "small" / "checkpoint-4"),
        timeout_seconds=400,
    )
    if mode == "lossless":
        assert_equal(resumed[0][1], plain[0][1])
        assert all(resumed[0][0][step] == plain[0][0][step] for step in range(5, STEPS + 1))
    else:
        assert all(abs(resumed[0][0][step] - plain[0][0][step]) < 0.01 for step in range(5, STEPS + 1))
