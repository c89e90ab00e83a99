"""How a Trainer keeps its state: whole on one rank, or a part of it on each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

from accelerate.state import AcceleratorState, is_initialized
from torch import nn

# What wraps modules under FSDP, and does not stand in the names of a checkpoint.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


class Sharding(Enum):
    """What a Trainer writes into a checkpoint."""

    NONE = "files of one rank"
    FULL = "files of one rank, gathered from all (FSDP, FULL_STATE_DICT)"
    SHARDED = "DCP directories (FSDP, SHARDED_STATE_DICT)"
    OTHER = "something else (DeepSpeed, FSDP of XLA or with LOCAL_STATE_DICT)"


def sharding_of(args: Any) -> Sharding:
    """Return what a Trainer with these `TrainingArguments` writes; its accelerator exists."""
    if getattr(args, "deepspeed", None):
        return Sharding.OTHER
    state = AcceleratorState() if is_initialized() else None
    plugin = getattr(state, "fsdp_plugin", None)
    if plugin is None:
        # `accelerate launch` can ask for either without the arguments.
        is_deepspeed = getattr(getattr(state, "distributed_type", None), "name", "") == "DEEPSPEED"
        return Sharding.OTHER if is_deepspeed or getattr(args, "fsdp", None) else Sharding.NONE
    kinds = {"FULL_STATE_DICT": Sharding.FULL, "SHARDED_STATE_DICT": Sharding.SHARDED}
    shown = str(plugin.state_dict_type)
    return next((kind for name, kind in kinds.items() if name in shown), Sharding.OTHER)


def plain_names(model: nn.Module) -> list[str]:
    """Return the names of a model's weights and buffers as checkpoints have them, whatever wraps its modules."""
    return [*_unwrapped(name for name, _ in model.named_parameters(remove_duplicate=False)), *plain_buffer_names(model)]


def plain_buffer_names(model: nn.Module) -> list[str]:
    """Return the names of a model's buffers, likewise."""
    return list(_unwrapped(name for name, _ in model.named_buffers(remove_duplicate=False)))


def _unwrapped(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        yield name
