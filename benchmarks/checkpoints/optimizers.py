"""Measures near-lossless checkpoints of a small Llama with every optimizer: how small they are, how a resume goes on.

Run `python -m benchmarks.checkpoints.optimizers [NAME ...]`; it needs the packages of the optimizers that it is asked
for, and no network. A plain Trainer saves three times. Its checkpoints are made small in their order, as the callback
does, and a new Trainer resumes from the third. It is compared with the run that went on. An optimizer takes a minute of
one core with three seeds; several processes may measure different ones at once.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import statistics
import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils.logging import set_verbosity_error

from benchmarks.checkpoints.__main__ import merge
from benchmarks.machine import cpu_name
from hf_trainweights.checkpoint import compress_directory
from hf_trainweights.checkpoint.planning.roles import optimizer_parameter_names
from hf_trainweights_cli.demo.corpus import read_corpus

RESULTS = Path(__file__).parent.parent / "results" / "checkpoint_optimizers.json"
SEEDS = (0, 1, 2)
MODE = "near-lossless"
SAVES = (50, 100, 150)
STEPS_AFTER = 100
# The learning rate falls as if training went on for longer.
_SCHEDULE_STEPS = 250
_BATCH, _WINDOW_TOKENS = 2, 64
_FILES = ("pytorch_model.bin", "model.safetensors", "optimizer.pt")


@dataclass(frozen=True)
class Choice:
    """An optimizer: a value of the Trainer's `optim`, or a class as `module:name` with its options.

    `matrices_only` leaves vectors untrained, as Muon does.
    """

    lr: float
    optim: str = ""
    made_by: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    matrices_only: bool = False

    def make(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """Return the optimizer, or None if the Trainer makes it."""
        if not self.made_by:
            return None
        module, _, name = self.made_by.partition(":")
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        return getattr(importlib.import_module(module), name)(trained, lr=self.lr, **self.options)


def _torch(name: str, lr: float, **options: Any) -> Choice:
    return Choice(lr, made_by=f"torch.optim:{name}", options=options)


CHOICES = {
    "AdamW": _torch("AdamW", 1e-3),
    "AMSGrad": _torch("AdamW", 1e-3, amsgrad=True),
    "NAdam": _torch("NAdam", 1e-3),
    "RAdam": _torch("RAdam", 1e-3),
    "Adamax": _torch("Adamax", 2e-3),
    "Muon": Choice(1e-2, made_by="torch.optim:Muon", matrices_only=True),
    "Lion": Choice(2e-4, made_by="lion_pytorch:Lion"),
    "SGD with momentum": _torch("SGD", 0.1, momentum=0.9),
    "SGD": _torch("SGD", 0.5),
    "RMSprop": _torch("RMSprop", 3e-4),
    "RMSprop with momentum": _torch("RMSprop", 1e-4, momentum=0.9),
    "Adagrad": _torch("Adagrad", 5e-3),
    "Adadelta": _torch("Adadelta", 1.0),
    "Adafactor of torch": _torch("Adafactor", 1e-2),
    "ASGD": _torch("ASGD", 0.5),
    "Rprop": _torch("Rprop", 1e-4),
    "Prodigy": Choice(1.0, made_by="prodigyopt:Prodigy"),
    "ADOPT": Choice(1e-3, made_by="pytorch_optimizer:ADOPT"),
    "AdEMAMix": Choice(1e-3, made_by="pytorch_optimizer:AdEMAMix"),
    **{
        optim: Choice(lr, optim=optim)
        for optim, lr in {
            "adamw_torch_8bit": 1e-3,
            "adafactor": 1e-3,
            "schedule_free_adamw": 2e-3,
            "schedule_free_radam": 2e-3,
            "schedule_free_sgd": 1.0,
            "stable_adamw": 1e-3,
            "grokadamw": 1e-3,
            "adamw_bnb_8bit": 1e-3,
            "paged_adamw_32bit": 1e-3,
            "lion_32bit": 2e-4,
            "lion_8bit": 2e-4,
            "rmsprop_bnb_32bit": 3e-4,
            "ademamix": 1e-3,
        }.items()
    },
}


class _Saver(TrainerCallback):
    """Saves at some steps, stops after another, and collects the losses."""

    def __init__(self, saves: Iterable[int], stop: int):
        self.losses: dict[int, float] = {}
        self._saves, self._stop = {*saves}, stop

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = state.global_step in self._saves
        control.should_training_stop |= state.global_step >= self._stop

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.losses[state.global_step] = logs["loss"]


def train(
    choice: Choice,
    seed: int,
    directory: Path,
    saver: _Saver,
    resume_from: Path | None = None,
) -> Trainer:
    """Train, or go on training.

    Args:
        choice: The optimizer.
        seed: Decides the initial weights and the order of the data.
        directory: Where checkpoints go.
        saver: Says when to save and to stop, and collects the losses.
        resume_from: The checkpoint to go on from.

    Returns:
        The Trainer after its last step.
    """
    torch.manual_seed(seed)
    sizes = {"hidden_size": 160, "intermediate_size": 416, "num_hidden_layers": 4, "num_attention_heads": 5}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=True, use_cache=False, **sizes))
    if choice.matrices_only:
        for weight in model.parameters():
            weight.requires_grad_(weight.dim() == 2)
    arguments = TrainingArguments(
        str(directory),
        max_steps=_SCHEDULE_STEPS,
        seed=seed,
        save_strategy="no",
        logging_steps=1,
        learning_rate=choice.lr,
        lr_scheduler_type="constant" if choice.optim.startswith("schedule_free") else "cosine",
        warmup_steps=20,
        per_device_train_batch_size=_BATCH,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **({"optim": choice.optim} if choice.optim else {}),
    )
    trainer = Trainer(model, arguments, train_dataset=_rows(), callbacks=[saver], optimizers=(choice.make(model), None))
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
    return trainer


@cache
def _rows() -> list[dict[str, Tensor]]:
    count = _SCHEDULE_STEPS * _BATCH
    data = bytearray("".join(read_corpus().train).encode()[: count * _WINDOW_TOKENS])
    rows = torch.frombuffer(data, dtype=torch.uint8).long().view(count, _WINDOW_TOKENS)
    return [{"input_ids": row, "labels": row} for row in rows]


def measure(choice: Choice, seed: int, directory: Path) -> dict[str, Any]:
    """Train with an optimizer and resume.

    Args:
        choice: The optimizer.
        seed: For weights and data.
        directory: An empty directory.

    Returns:
        `ratio`: plain bytes of weights and optimizer over bytes on disk, of the third save. `roles` that were rounded.
        `differences` of the losses after the resume to the run that went on; `loss`: its mean over the last ten steps.
    """
    stop = SAVES[-1] + STEPS_AFTER
    whole, resumed = _Saver(SAVES, stop), _Saver((), stop)
    trainer = train(choice, seed, directory, whole)
    last = directory / f"checkpoint-{SAVES[-1]}"
    plain_bytes = sum((last / name).stat().st_size for name in _FILES if (last / name).exists())
    names = optimizer_parameter_names(trainer.model, trainer.optimizer)
    for step in SAVES:
        manifest = compress_directory(
            directory / f"checkpoint-{step}", mode=MODE, optimizer=trainer.optimizer, optimizer_names=names
        )
    train(choice, seed, directory / "resumed", resumed, last)
    losses = [whole.losses[step] for step in range(SAVES[-1] + 1, stop + 1)]
    return {
        "class": manifest.metadata["optimizer"]["class"],
        "roles": manifest.metadata["optimizer"]["rounded"],
        "ratio": plain_bytes / sum(entry.size_bytes for name, entry in manifest.files.items() if name in _FILES),
        "loss": statistics.fmean(losses[-10:]),
        "differences": _difference(whole, resumed, stop),
    }


def _difference(whole: _Saver, resumed: _Saver, stop: int) -> dict[str, float]:
    steps = range(SAVES[-1] + 1, stop + 1)
    differences = [resumed.losses[step] - whole.losses[step] for step in steps]
    sizes = [abs(difference) for difference in differences]
    return {"mean": statistics.fmean(sizes), "largest": max(sizes), "bias": statistics.fmean(differences)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints.optimizers", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="optimizers to measure; default: all")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many seeds")
    parser.add_argument("--to", type=Path, default=RESULTS, help="the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    set_verbosity_error()
    warnings.simplefilter("ignore")
    logging.getLogger("hf_trainweights").setLevel(logging.ERROR)
    merge(arguments.to, ("cpu",), cpu_name())
    for seed in SEEDS[: arguments.seeds]:
        for name in arguments.names or CHOICES:
            with tempfile.TemporaryDirectory() as directory:
                found = measure(CHOICES[name], seed, Path(directory))
            merge(arguments.to, ("optimizers", name, str(seed)), found)
            print(f"{name}, seed {seed}: {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
