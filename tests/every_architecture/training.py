"""Trains a quantized model for two steps with a Trainer that saves after the first, and resumes from that save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from architectures import floating_tensors
from every_architecture.comparing import DifferenceError
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from hf_trainweights import QuantizedTensor


class NotAskedError(Exception):
    """A question does not apply to a model."""


def require_resume(
    make: Callable[[], nn.Module], inputs: dict[str, Tensor], folder: Path, *callbacks: TrainerCallback
) -> None:
    """Check that a resume after one step has each weight that was trained to the bit.

    Args:
        make: Returns the model to train, the same each time.
        inputs: Arguments of its forward.
        folder: Where the Trainer writes.
        callbacks: Of the Trainer.

    Raises:
        DifferenceError: A weight differs, or nothing was trained.
        NotAskedError: There is nothing to train, or the forward does not train.
    """
    model, seen = make(), Weights()
    start = trained_weights(model)
    if not start:
        raise NotAskedError("it has no weight to train")
    _require_gradient(model, inputs)
    _trainer(model, inputs, folder, seen, *callbacks).train()
    changed = [name for name, weight in seen.after[1].items() if not torch.equal(weight, start[name])]
    if not changed:
        raise NotAskedError("no weight of these gets a gradient")
    again, resumed = make(), Weights()
    _trainer(again, inputs, folder, resumed, *callbacks).train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    names = [name for name, weight in seen.after[1].items() if not torch.equal(weight, resumed.at_start[name])]
    if names:
        raise DifferenceError(f"{len(names)} of {len(start)} weights are not resumed: {', '.join(names[:3])}")


def with_adapters(model: PreTrainedModel, names: list[str]) -> nn.Module:
    """Return a model with LoRA on some of its Linears.

    Raises:
        NotAskedError: There are none.
    """
    if not names:
        raise NotAskedError("it has no quantized Linear")
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=2, target_modules=names, init_lora_weights=False))


def quantized_linears(model: nn.Module) -> list[str]:
    """Return the names of the Linears whose weights are quantized."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and isinstance(module.weight, QuantizedTensor)
    ]


def with_float_parts(model: PreTrainedModel) -> nn.Module:
    """Return a model of which all trains that is in float."""
    for parameter in model.parameters():
        if not isinstance(parameter, QuantizedTensor):
            parameter.requires_grad_(parameter.is_floating_point())
    return model


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of what trains."""
    return {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}


class Weights(TrainerCallback):
    """Keeps what trains, at the start of a run and after each step, and has the first step saved alone."""

    def __init__(self) -> None:
        self.at_start: dict[str, Tensor] = {}
        self.after: dict[int, dict[str, Tensor]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.at_start = trained_weights(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.after[state.global_step] = trained_weights(model)
        control.should_save = state.global_step == 1


class SquaresTrainer(Trainer):
    """Makes the outputs small, which every model can learn without labels."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = _squares(outputs)
        return (loss, outputs) if return_outputs else loss


def _squares(outputs: Any) -> Tensor:
    values = [value for value in floating_tensors(outputs) if value.requires_grad]
    if not values:
        raise NotAskedError("no output has a gradient")
    return torch.stack([value.float().square().mean() for value in values]).mean()


def _require_gradient(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    try:
        loss = _squares(model.train()(**inputs))
        loss.backward()
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
        if type(error).__module__.startswith("hf_trainweights"):
            raise
        raise NotAskedError(f"a step of training fails: {' '.join(str(error).split())[:120]}") from error
    model.zero_grad()
    if not loss.isfinite():
        raise NotAskedError("the loss is not finite")


def _trainer(model: nn.Module, inputs: dict[str, Tensor], folder: Path, *callbacks: TrainerCallback) -> Trainer:
    args = TrainingArguments(
        str(folder),
        max_steps=2,
        save_steps=1,
        learning_rate=1e-2,
        per_device_train_batch_size=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        logging_strategy="no",
    )
    return SquaresTrainer(
        model,
        args,
        data_collator=lambda _: dict(inputs),
        train_dataset=[{"row": row} for row in range(4)],
        callbacks=list(callbacks),
    )
