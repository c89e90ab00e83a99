"""Short runs of an unmodified Trainer on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from architectures import ARCHITECTURES
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

STEPS = 8


class Losses(TrainerCallback):
    """Collects the loss of every step."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.by_step[state.global_step] = logs["loss"]


def build(name: str = "llama") -> PreTrainedModel:
    """Return a tiny model of an architecture, always with the same weights."""
    return ARCHITECTURES[name].build()


def trainer_of(out: Path, *callbacks: Any, model: nn.Module | None = None, **options: Any) -> tuple[Trainer, Losses]:
    """Return a Trainer that saves every second of `STEPS` steps, and what collects its losses."""
    losses = Losses()
    model = build() if model is None else model
    vocabulary = model.config.vocab_size
    ids = (torch.arange(16 * 12).reshape(16, 12) * 7) % vocabulary
    defaults = {
        "max_steps": STEPS,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    data = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(str(out), **{**defaults, **options}),
        train_dataset=data,
        eval_dataset=data[:2],
        callbacks=[*callbacks, losses],
    )
    return trainer, losses


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return a copy of what a Trainer has trained."""
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Check that two state dicts hold the same bits."""
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert different == []
