"""The state of training as a dict: collected from the objects of a loop, saved, loaded, and restored into them.

| key | value | file |
|---|---|---|
| `model` | the module's state, see module_state.py | `pytorch_model.bin` |
| `optimizer`, `scheduler`, `scaler` | their `state_dict()` | `optimizer.pt`, `scheduler.pt`, `scaler.pt` |
| `rng` | states of the random number generators | `rng_state.pth` |
| `epoch`, `step`, `extra` | progress, and values that the caller adds | `trainweights_state.pt` |
| `names` | names of buffers, names of the optimizer's parameters, and its class | the same |

A key without a value is left out.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_trainweights.checkpoint.encoded.reader import load_file, register_anchor_directory
from hf_trainweights.checkpoint.encoded.storage_tasks import Plan
from hf_trainweights.checkpoint.loop.module_state import load_module_state, module_state, unwrapped_name
from hf_trainweights.checkpoint.loop.progress import rng_state, set_rng_state
from hf_trainweights.checkpoint.manifest import Manifest, require_progress
from hf_trainweights.checkpoint.planning.optimizers import class_name
from hf_trainweights.checkpoint.planning.policy import ModeName, Policy
from hf_trainweights.checkpoint.planning.roles import optimizer_parameter_names
from hf_trainweights.checkpoint.run.base import BaseChoice
from hf_trainweights.checkpoint.run.checkpoints import OPTIMIZER_NAME, STATE_NAME, intact_manifest
from hf_trainweights.checkpoint.run.job import SaveJob
from hf_trainweights.checkpoint.run.weights import WEIGHTS_NAME, Weights
from hf_trainweights.checkpoint.whole.writer import save_new_directory
from hf_trainweights.errors import ConfigError, CorruptFileError

_FILES = {
    "model": WEIGHTS_NAME,
    "optimizer": OPTIMIZER_NAME,
    "scheduler": "scheduler.pt",
    "scaler": "scaler.pt",
    "rng": "rng_state.pth",
}
# These keys are stored together in `STATE_NAME`.
_SMALL_KEYS = ("epoch", "step", "extra", "names")


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
        optimizer: An object with `state_dict`; it may be new.
        scheduler: An object with `state_dict`.
        scaler: A GradScaler, also a disabled one.
        epoch: Epochs done.
        step: Steps done.
        rng: Whether to include the random number generators: Python's, numpy's, and torch's on CPU and CUDA.
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
    objects = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    names = {"buffers": buffers, "optimizer": optimizer_parameter_names(model, optimizer)}
    if optimizer is not None:
        names["optimizer_class"] = class_name(optimizer)
    checkpoint = {
        "model": module_state(model),
        **{key: source.state_dict() for key, source in objects.items() if source is not None},
        "rng": rng_state() if rng else None,
        "epoch": epoch,
        "step": step,
        "extra": extra,
        "names": names,
    }
    return {key: value for key, value in checkpoint.items() if value is not None}


def restore_checkpoint(
    checkpoint: Mapping[str, Any],
    model: nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    *,
    rng: bool = True,
) -> tuple[float | None, int | None]:
    """Restore the state of training into the objects of a loop.

    Args:
        checkpoint: The result of `build_checkpoint` or `load_checkpoint`. It is not changed, and shares no memory with
            the objects afterwards.
        model: Built as it was when it was saved, like the next three objects.
        optimizer: The optimizer, if there is one.
        scheduler: The scheduler, if there is one.
        scaler: The GradScaler, if there is one.
        rng: Whether to restore the random number generators as well.

    Returns:
        `(epoch, step)`, each None if it was not stored. If the checkpoint lacks the state of an object, that keeps its
        own state, with a warning.

    Raises:
        CorruptFileError: The model's names or shapes differ.
        ValueError: The optimizer has other parameter groups; torch raises it.

    Examples:
        >>> source, target = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> restore_checkpoint(build_checkpoint(source, step=7), target)
        (None, 7)
        >>> source.weight.equal(target.weight)
        True
    """
    targets = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    copies = {key: copy.deepcopy(checkpoint.get(key)) for key, target in targets.items() if target is not None}
    return give_checkpoint({**checkpoint, **copies}, model, optimizer, scheduler, scaler, rng=rng)


def give_checkpoint(
    checkpoint: Mapping[str, Any], model: nn.Module, optimizer: Any, scheduler: Any, scaler: Any, *, rng: bool = True
) -> tuple[float | None, int | None]:
    """Restore the state of training as `restore_checkpoint` does, but let the objects use the checkpoint's memory."""
    load_module_state(model, checkpoint["model"])
    for key, target in {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}.items():
        if target is not None and checkpoint.get(key) is None:
            warnings.warn(f"The checkpoint has no {key}: it keeps the state it has.", stacklevel=3)
        elif target is not None and key == "optimizer":
            _load_optimizer_state(target, model, checkpoint)
        elif target is not None and checkpoint[key]:  # a disabled GradScaler returns {}, but does not load it
            target.load_state_dict(checkpoint[key])
    if rng and "rng" in checkpoint:
        set_rng_state(checkpoint["rng"])
    return checkpoint.get("epoch"), checkpoint.get("step")


def _load_optimizer_state(optimizer: Any, model: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Load an optimizer's state and undo torch's cast of it to the dtype of the parameters.

    An optimizer that keeps float32 moments for bfloat16 weights would lose two bytes of each value at every resume.
    `checkpoint` has `model`, `optimizer` and `names`.
    """
    saved = checkpoint["optimizer"]
    optimizer.load_state_dict(saved)
    own = {unwrapped_name(name): parameter for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, name in checkpoint.get("names", {}).get("optimizer", {}).items():
        weight, parameter = checkpoint["model"].get(name), own.get(unwrapped_name(name))
        if parameter is None or not isinstance(weight, torch.Tensor) or weight.dtype != parameter.dtype:
            continue  # the model has another dtype now, so torch's cast is right
        state = optimizer.state.get(parameters[index], {})
        for key, value in saved["state"].get(index, {}).items():
            current = state.get(key)
            if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor) and current.dtype != value.dtype:
                state[key] = value.to(current.device)


def save_checkpoint(
    checkpoint: Mapping[str, Any],
    path: str | Path,
    *,
    mode: ModeName = "lossless",
    rules: Mapping[str, Any] | None = None,
    quantize_i8: bool | None = None,
) -> None:
    """Save a checkpoint directory, which appears complete or not at all, and needs no other directory.

    Args:
        checkpoint: The result of `build_checkpoint` or `load_checkpoint`.
        path: A missing or an existing empty directory.
        mode: A mode of `Policy`: "lossless", "near-lossless" or "compact".
        rules: Rules of `Policy`: exceptions from the mode.
        quantize_i8: True stores weights as int8 groups and everything else exactly; your rules go first.

    Raises:
        ConfigError: An option is wrong, `quantize_i8` is combined with a lossy mode, the checkpoint has an unknown key,
            or its step or epoch is not a Python number.
        UnstorableError: A value cannot be stored; the error names file and key.
        SaveError: `path` holds something, or the disk is full or refuses; nothing is left behind.

    Examples:
        >>> import tempfile
        >>> from torch import nn
        >>> from hf_trainweights.checkpoint import build_checkpoint
        >>> path = tempfile.mkdtemp()
        >>> save_checkpoint(build_checkpoint(nn.Linear(2, 1), step=7), path)
        >>> load_checkpoint(path)["step"]
        7
    """
    if quantize_i8 and mode != "lossless":
        next_step = "Leave one of them out, or write rules={'weight': 'int8'} to mix them."
        raise ConfigError("mode", "lossless together with quantize_i8", repr(mode), next_step)
    policy = Policy(mode, rules or {})
    if quantize_i8:
        policy = Policy(mode, {**policy.rules, "weight": policy.rules.get("weight", "int8")})
    save_training_state(checkpoint, Path(path), policy)


def save_training_state(
    checkpoint: Mapping[str, Any],
    path: Path,
    policy: Policy,
    *,
    anchor_every: int | None = None,
    base: BaseChoice | None = None,
    metrics: Mapping[str, Any] | None = None,
) -> Manifest:
    """Save a result of `build_checkpoint` in a missing or empty directory, by itself or as a checkpoint of a run.

    `anchor_every` is the most checkpoints of the run that one anchor serves; by default the checkpoint needs no other.
    ConfigError: no model, an unknown key, a step or epoch that is no number, a rule that fits nothing, metrics that are
    no JSON, or a base without weights. UnstorableError names file and key. SaveError: nothing is left behind.
    """
    unknown = sorted(set(checkpoint) - set(_FILES) - set(_SMALL_KEYS))
    if unknown or "model" not in checkpoint:
        expected = f"a model and any of {', '.join([*_FILES, *_SMALL_KEYS])}"
        keys = f"the keys {', '.join(map(str, checkpoint))}"
        raise ConfigError("checkpoint", expected, keys, "Put what is your own under `extra`.")
    step, epoch = checkpoint.get("step"), checkpoint.get("epoch")
    require_progress(step, epoch)
    names = checkpoint.get("names", {})
    optimizer = checkpoint.get("optimizer", {})
    optimizer_class = names.get("optimizer_class")
    weights = Weights(
        checkpoint["model"], names.get("buffers", ()), optimizer, names.get("optimizer", {}), optimizer_class
    )
    policy.require_used([*map(str, checkpoint["model"]), *names.get("optimizer", {}).values()])
    small = {key: checkpoint[key] for key in _SMALL_KEYS if key in checkpoint}
    small["parts"] = file_keys = [key for key in _FILES if key in checkpoint]
    trees: dict[str, tuple[Any, Plan]] = {STATE_NAME: (small, {})}
    trees |= {_FILES[key]: (checkpoint[key], {}) for key in file_keys if key != "model"}
    if "optimizer" in checkpoint:
        plan = policy.plan_optimizer(optimizer, names=names.get("optimizer") or None, optimizer=optimizer_class)
        trees[OPTIMIZER_NAME] = (optimizer, plan)
    return save_new_directory(
        SaveJob(path, policy, anchor_every, base),
        weights,
        trees,
        step=step,
        epoch=epoch,
        metrics=dict(metrics or {}),
        metadata={"policy": policy.to_dict()},
    )


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint directory that `save_checkpoint` or `CheckpointManager` wrote.

    Args:
        path: The directory; it may have been moved.

    Returns:
        The dict that was saved, its tensors on the CPU. They are bit for bit the same, unless the mode rounds them.

    Raises:
        CorruptFileError: Something in it is damaged or missing, or it was not written by `save_checkpoint`.
        OSError: It cannot be read.

    Examples:
        >>> import tempfile
        >>> from torch import nn
        >>> from hf_trainweights.checkpoint import build_checkpoint
        >>> path = tempfile.mkdtemp()
        >>> save_checkpoint(build_checkpoint(nn.Linear(2, 1), extra={"note": [1, 2.5]}), path)
        >>> load_checkpoint(path)["extra"]
        {'note': [1, 2.5]}
    """
    path = Path(path)
    intact_manifest(path)
    return load_verified(path)


def load_verified(path: Path) -> dict[str, Any]:
    """Read a checkpoint directory as `load_checkpoint` does, after the caller has compared it with its manifest."""
    if not (path / STATE_NAME).is_file():
        next_step = "Resume a Trainer's checkpoint with Trainer.train(resume_from_checkpoint=...)."
        raise CorruptFileError(str(path), f"a directory with {STATE_NAME}", "none", next_step)
    register_anchor_directory(path)
    checkpoint = load_file(path / STATE_NAME)
    keys = checkpoint.pop("parts", None) if isinstance(checkpoint, dict) else None
    if not isinstance(keys, list) or "model" not in keys or not all(key in [*_FILES] for key in keys):
        next_step = "Use another checkpoint: this one was not written by save_checkpoint."
        raise CorruptFileError(str(path / STATE_NAME), "the parts of a checkpoint", repr(keys)[:200], next_step)
    for key in keys:
        try:
            checkpoint[key] = load_file(path / _FILES[key])
        except FileNotFoundError as error:
            next_step = "Use another checkpoint, or restore this one from a copy."
            raise CorruptFileError(str(path), f"the file {_FILES[key]}", "none", next_step) from error
    return checkpoint
