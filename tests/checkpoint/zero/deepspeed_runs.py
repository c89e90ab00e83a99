"""Short runs of DeepSpeed on the CPU, in the processes of `ranks.run_ranks`. Importing DeepSpeed takes seconds."""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.trainers import build, trainer_of

RANKS = 2
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def set_up(rank: int) -> None:
    """Set up what the launcher of DeepSpeed does."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # the group is there already
    warnings.simplefilter("ignore")


def config(stage: int, **options: Any) -> dict[str, Any]:
    zero = {"stage": stage, **options.pop("zero", {})}
    return {"zero_optimization": zero, "zero_allow_untested_optimizer": True, **options}


def whole_weights(model: Any, stage: int) -> dict[str, torch.Tensor]:
    """Return a copy of all parameters, which ZeRO 3 gathers first."""
    import deepspeed

    if stage < 3:
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    weights = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            weights[name] = parameter.detach().clone()
    return weights


def train(
    rank: int,
    out: Path,
    stage: int,
    callbacks: tuple[Any, ...] = (),
    resume: str | None = None,
    model: Any = None,
    **options: Any,
) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """Train with a Trainer on all ranks; return the losses by step, and the weights."""
    set_up(rank)
    deepspeed_config = config(stage, train_micro_batch_size_per_gpu=2, **options.pop("config", {}))
    trainer, losses = trainer_of(out, *callbacks, model=model or build(), deepspeed=deepspeed_config, **options)
    trainer.train(resume_from_checkpoint=resume)
    return losses.by_step, whole_weights(trainer.model, stage)
