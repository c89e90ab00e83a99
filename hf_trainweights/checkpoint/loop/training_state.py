"""The state of training as a dict: collected from a loop's objects, and put back into them.

| key | value |
|---|---|
| `model` | the module's state, see module_state.py |
| `optimizer`, `scheduler`, `scaler` | what their `state_dict()` gives |
| `rng` | states of the random number generators |
| `epoch`, `step`, `extra` | progress, and what the caller adds |
| `names` | which names are buffers, and the names of the optimizer's parameters |

A key is left out where there is no value. training_files.py says which file holds what.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_trainweights.checkpoint.loop.module_state import load_module_state, module_state
from hf_trainweights.checkpoint.loop.optimizer_state import load_optimizer_state
from hf_trainweights.checkpoint.loop.rng_state import rng_state, set_rng_state
from hf_trainweights.checkpoint.planning.optimizer_layout import optimizer_parameter_names


def build_checkpoint(
    model: nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    *,
    epoch: float | None = None,
    step: int | None = None,
    rng: bool = True,
    extra: Any = None,
) -> dict[str, Any]:
    """Collect the state of training.

    Args:
        model: Any module.
        optimizer: With `state_dict`; it may be fresh.
        scheduler: With `state_dict`.
        scaler: A GradScaler, also a disabled one.
        epoch: Epochs done.
        step: Steps done.
        rng: Whether to include the random number generators: Python's, torch's on CPU and CUDA, and numpy's if numpy
            is imported.
        extra: Nested lists, tuples and dicts of tensors and scalars, to be stored exactly.

    Returns:
        A dict with the keys of this module's table. Its tensors share memory with the model and the optimizer.

    Raises:
        ConfigError: A parameter is of a tensor subclass that cannot be taken apart.

    Examples:
        >>> checkpoint = build_checkpoint(nn.Linear(2, 1), step=7, rng=False)
        >>> sorted(checkpoint), checkpoint["model"]["bias"].shape
        (['model', 'names', 'step'], torch.Size([1]))
    """
    buffers = [name for name, _ in model.named_buffers(remove_duplicate=False)]
    parts = {
        "model": module_state(model),
        "optimizer": optimizer.state_dict() if optimizer is not None else None,
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
        "scaler": scaler.state_dict() if scaler is not None else None,
        "rng": rng_state() if rng else None,
        "epoch": epoch,
        "step": step,
        "extra": extra,
        "names": {"buffers": buffers, "optimizer": optimizer_parameter_names(model, optimizer)},
    }
    return {key: value for key, value in parts.items() if value is not None}


def restore_checkpoint(
    checkpoint: Mapping[str, Any],
    model: nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    *,
    rng: bool = True,
) -> tuple[float | None, int | None]:
    """Put the state of training back.

    Args:
        checkpoint: What `build_checkpoint` or `load_checkpoint` returned; it stays as it is and shares no memory with
            the objects afterwards.
        model: Built as it was.
        optimizer: Built as it was.
        scheduler: Built as it was.
        scaler: Built as it was.
        rng: Whether to restore the random number generators as well.

    Returns:
        `(epoch, step)`, None where they were not stored. A part that is given here but is not in the checkpoint keeps
        its own state, with a warning.

    Raises:
        CorruptFileError: The model's names or shapes differ.
        ValueError: torch's own, where the optimizer has other parameter groups.

    Examples:
        >>> source, target = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> restore_checkpoint(build_checkpoint(source, step=7), target)
        (None, 7)
        >>> source.weight.equal(target.weight)
        True
    """
    load_module_state(model, checkpoint["model"])
    parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    for part, target in parts.items():
        if target is not None and part not in checkpoint:
            warnings.warn(f"The checkpoint has no {part}: it keeps the state it has.", stacklevel=2)
            parts[part] = None
    if parts["optimizer"] is not None:
        load_optimizer_state(optimizer, model, checkpoint)
    if parts["scheduler"] is not None:
        scheduler.load_state_dict(copy.deepcopy(checkpoint["scheduler"]))
    if parts["scaler"] is not None and checkpoint["scaler"]:  # {} is what a disabled GradScaler gives, and refuses
        scaler.load_state_dict(checkpoint["scaler"])
    if rng and "rng" in checkpoint:
        set_rng_state(checkpoint["rng"])
    return checkpoint.get("epoch"), checkpoint.get("step")
