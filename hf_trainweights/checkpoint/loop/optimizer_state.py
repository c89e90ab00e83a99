"""An optimizer as a loop sees it: the names of its parameters, its state without casts, and when a step is done."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn


def load_optimizer_state(optimizer: Any, model: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Load an optimizer's state without the cast to the parameter's dtype that torch makes on loading.

    An optimizer that keeps float32 moments for bfloat16 weights would lose two bytes of each at every resume.
    `checkpoint` has `model`, `optimizer` and `names`, and shares no memory with the optimizer afterwards.
    """
    saved = checkpoint["optimizer"]
    optimizer.load_state_dict(copy.deepcopy(saved))
    own = dict(model.named_parameters())
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, name in checkpoint.get("names", {}).get("optimizer", {}).items():
        weight = checkpoint["model"].get(name)
        if name not in own or not isinstance(weight, torch.Tensor) or weight.dtype != own[name].dtype:
            continue  # the model has another dtype now, so torch's cast is right
        state = optimizer.state.get(parameters[index], {})
        for key, value in saved["state"].get(index, {}).items():
            current = state.get(key)
            if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor) and current.dtype != value.dtype:
                state[key] = value.to(current.device, copy=True)


@contextlib.contextmanager
def optimizer_step_hook(optimizer: Any, hook: Callable[..., None]) -> Iterator[bool]:
    """Call a hook after every `optimizer.step()` of a block; yield whether it, or what it wraps, takes hooks."""
    register = getattr(getattr(optimizer, "optimizer", optimizer), "register_step_post_hook", None)
    handle = register(hook) if register else None
    try:
        yield handle is not None
    finally:
        if handle is not None:
            handle.remove()


@contextlib.contextmanager
def scaler_update_hook(scaler: Any, hook: Callable[[], None]) -> Iterator[None]:
    """Call a hook after every `scaler.update()` of a block, if there is a scaler.

    A GradScaler that finds an infinite gradient skips `optimizer.step()`, and `update` is all that tells of it. It
    takes no hooks, so its method is replaced in this one object until the block ends.
    """
    update = getattr(scaler, "update", None)
    if update is None:
        yield
        return

    def watched(*args: Any, **kwargs: Any) -> None:
        update(*args, **kwargs)
        hook()

    scaler.update = watched
    try:
        yield
    finally:
        scaler.update = update
