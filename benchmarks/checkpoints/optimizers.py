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
import shutil
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
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils.logging import set_verbosity_error

from benchmarks.checkpoints.__main__ import merge
from benchmarks.machine import cpu_name
from hf_trainweights.checkpoint import compress_directory
from hf_trainweights.checkpoint.manifest import Manifest
from hf_trainweights.checkpoint.planning.optimizers import class_name
from hf_trainweights.checkpoint.planning.roles import optimizer_parameter_names
from hf_trainweights_cli.demo.corpus import read_corpus

RESULTS = Path(__file__).parent.parent / "results" / "checkpoint_optimizers.json"
SEEDS = (0, 1, 2)
MODE = "near-lossless"
CONTROLS = ("neighbours", "finer", "random")
SAVES = (50, 100, 150)
STOP = SAVES[-1] + 100
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
    "AdamW, lr 0.003": _torch("AdamW", 3e-3),
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
    # Its authors ask for these options where the rate is warmed up. In their absence a change of one unit in the last
    # place moves the losses by a hundredth.
    "Prodigy": Choice(
        1.0, made_by="prodigyopt:Prodigy", options={"safeguard_warmup": True, "use_bias_correction": True}
    ),
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
            "grokadamw": 1e-3,
            "adamw_bnb_8bit": 1e-3,
            "paged_adamw_32bit": 1e-3,
            "lion_32bit": 2e-4,
            "lion_8bit": 2e-4,
            "rmsprop_bnb_32bit": 3e-4,
            "ademamix": 1e-3,
            "ademamix_8bit": 1e-3,
            "rmsprop_bnb_8bit": 3e-4,
        }.items()
    },
    # The Trainer's value `stable_adamw` takes Triton, which needs a GPU, wherever that is installed.
    "stable_adamw": Choice(1e-3, made_by="optimi:StableAdamW", options={"triton": False}),
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
    model = small_llama(seed)
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
    rows = [{"input_ids": row, "labels": row} for row in text_rows(_SCHEDULE_STEPS * _BATCH)]
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[saver], optimizers=(choice.make(model), None))
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
    return trainer


def small_llama(seed: int) -> LlamaForCausalLM:
    """Return an untrained Llama of 1.25 million parameters that reads bytes."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 160, "intermediate_size": 416, "num_hidden_layers": 4, "num_attention_heads": 5}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=True, use_cache=False, **sizes))


@cache
def text_rows(count: int) -> Tensor:
    """Return the bytes of Python sources in so many rows, one token a byte; int64 of shape `[count, 64]`."""
    data = bytearray("".join(read_corpus().train).encode()[: count * _WINDOW_TOKENS])
    return torch.frombuffer(data, dtype=torch.uint8).long().view(count, _WINDOW_TOKENS)


def measure(choice: Choice, seed: int, directory: Path, *, with_controls: bool = False) -> dict[str, Any]:
    """Train with an optimizer and resume.

    Args:
        choice: The optimizer.
        seed: For weights and data.
        directory: An empty directory.
        with_controls: Resume three times more: from exact weights that are off by one unit in the last place, from a
            save whose errors are a sixteenth, and from the exact save plus errors of the same sizes whose signs are
            random.

    Returns:
        `ratio`: plain bytes of weights and optimizer over bytes on disk, of the third save. `roles` that were rounded.
        `differences` of the losses after the resume to the run that went on; `loss`: its mean over the last ten steps.
        `controls`: the differences after the other resumes, by name.
    """
    whole = _Saver(SAVES, STOP)
    trainer = train(choice, seed, directory / "plain", whole)
    last = directory / "plain" / f"checkpoint-{SAVES[-1]}"
    plain_bytes = sum((last / name).stat().st_size for name in _FILES if (last / name).exists())
    manifest = _compress(directory / "small", trainer)
    losses = [whole.losses[step] for step in range(SAVES[-1] + 1, STOP + 1)]
    optimizer = manifest.metadata.get("optimizer", {"class": class_name(trainer.optimizer), "rounded": []})
    found = {
        "class": optimizer["class"],
        "roles": optimizer["rounded"],
        "ratio": plain_bytes / sum(entry.size_bytes for name, entry in manifest.files.items() if name in _FILES),
        "loss": statistics.fmean(losses[-10:]),
        "differences": _resume(choice, seed, directory / "small", whole),
    }
    if with_controls:
        shutil.copytree(directory / "plain", directory / "neighbours")
        move_weights(directory / "neighbours" / last.name, seed)
        _compress(directory / "finer", trainer, _finer_rules(manifest))
        shutil.copytree(directory / "plain", directory / "random")
        scatter(directory / "random" / last.name, directory / "small" / last.name, seed)
        controls = {name: _resume(choice, seed, directory / name, whole) for name in CONTROLS}
        found["controls"] = controls
    return found


def _compress(directory: Path, trainer: Trainer, rules: dict[str, Any] | None = None) -> Manifest:
    """Copy the plain checkpoints and make them small in their order, and return the manifest of the last one."""
    shutil.copytree(directory.with_name("plain"), directory)
    names = optimizer_parameter_names(trainer.model, trainer.optimizer)
    options = {"mode": MODE, "rules": rules, "optimizer": trainer.optimizer, "optimizer_names": names}
    return [compress_directory(directory / f"checkpoint-{step}", **options) for step in SAVES][-1]


def _finer_rules(manifest: Manifest) -> dict[str, Any]:
    """Return rules by which errors are a sixteenth of those in a checkpoint; squares have no finer steps."""
    rows = [row for entry in manifest.files.values() for row in entry.report.get("tensors", ())]
    bounds = {row["name"]: row["bound"] / 16 for row in rows if row["role"] == "weight" and row["bound"]}
    weights = {f"weight/{name}": {"codec": "delta-uniform", "bound": bound} for name, bound in bounds.items()}
    means = {"exp_avg": {"codec": "update-space", "step": 1 / 64}, "momentum": {"codec": "row-uniform", "step": 1 / 32}}
    return {**weights, **means}


def move_weights(checkpoint: Path, seed: int) -> None:
    """Move each weight of a plain checkpoint to a neighbouring number."""
    file = checkpoint / "model.safetensors"
    generator, weights = torch.Generator().manual_seed(seed), load_file(file)
    for name, weight in weights.items():
        upwards = torch.rand(weight.shape, generator=generator) < 0.5
        weights[name] = torch.nextafter(weight, torch.where(upwards, torch.inf, -torch.inf))
    save_file(weights, file, metadata={"format": "pt"})


def scatter(checkpoint: Path, small: Path, seed: int) -> None:
    """Give each number of a plain checkpoint the error that it has in the small one, with a random sign.

    The error of a number that is never negative is a factor, which is inverted or not.
    """
    generator = torch.Generator().manual_seed(seed)

    def scattered(exact: Any, rounded: Any) -> Any:
        if isinstance(exact, dict):
            return {key: scattered(value, rounded[key]) for key, value in exact.items()}
        if not isinstance(exact, Tensor) or not exact.is_floating_point() or torch.equal(exact, rounded):
            return exact
        is_kept = torch.rand(exact.shape, generator=generator) < 0.5
        if (exact >= 0).all():
            factor = torch.where(exact > 0, rounded / exact, torch.ones_like(exact))
            return exact * torch.where(is_kept, factor, 1 / factor)
        return torch.where(is_kept, rounded, 2 * exact - rounded)

    weights = load_file(checkpoint / "model.safetensors")
    rounded = torch.load(small / "pytorch_model.bin", weights_only=True)
    save_file(
        {name: scattered(weight, rounded[name]) for name, weight in weights.items()},
        checkpoint / "model.safetensors",
        metadata={"format": "pt"},
    )
    states = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    torch.save(scattered(states, torch.load(small / "optimizer.pt", weights_only=True)), checkpoint / "optimizer.pt")


def _resume(choice: Choice, seed: int, directory: Path, whole: _Saver) -> dict[str, float]:
    """Resume from the last checkpoint, and return how the losses differ from those of the run that went on."""
    resumed = _Saver((), STOP)
    train(choice, seed, directory / "resumed", resumed, directory / f"checkpoint-{SAVES[-1]}")
    steps = range(SAVES[-1] + 1, STOP + 1)
    differences = [resumed.losses[step] - whole.losses[step] for step in steps]
    sizes = [abs(difference) for difference in differences]
    return {"mean": statistics.fmean(sizes), "largest": max(sizes), "bias": statistics.fmean(differences)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints.optimizers", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="optimizers to measure; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="the seeds")
    parser.add_argument("--controls", action="store_true", help="resume in two more ways")
    parser.add_argument("--to", type=Path, default=RESULTS, help="the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    set_verbosity_error()
    warnings.simplefilter("ignore")
    logging.getLogger("hf_trainweights").setLevel(logging.ERROR)
    merge(arguments.to, ("cpu",), cpu_name())
    for seed in arguments.seeds:
        for name in arguments.names or CHOICES:
            with tempfile.TemporaryDirectory() as directory:
                found = measure(CHOICES[name], seed, Path(directory), with_controls=arguments.controls)
            merge(arguments.to, ("optimizers", name, str(seed)), found)
            print(f"{name}, seed {seed}: {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
