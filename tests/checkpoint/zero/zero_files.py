"""Checkpoints in the layout that DeepSpeed 0.19 writes for ZeRO, made by plain torch.

`test_deepspeed.py` compares these files with those of DeepSpeed itself.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from trees import ADAM_SETTINGS

from hf_trainweights.checkpoint.encoded import objects

Shapes = dict[str, tuple[int, ...]]
Values = dict[str, dict[str, Tensor]]

# Two groups, as most trainings have: decayed matrices, and vectors. Sizes leave padding, and cuts within rows.
GROUPS: tuple[Shapes, ...] = (
    {"embed.weight": (301, 64), "layers.0.weight": (129, 128), "head.weight": (128, 129)},
    {"layers.0.bias": (129,), "norm.weight": (64,), "norm.bias": (64,)},
)
BUFFER = {"positions": torch.arange(5.0)}


@contextlib.contextmanager
def pretended_packages() -> Iterator[None]:
    """Let the classes be imported whose objects encoded files may hold, so that plain files can hold them, too."""
    names = [name for _, name in objects.stand_ins()]
    before = dict(sys.modules)
    objects._class_of.cache_clear()
    for name in names:
        module, _, own_name = name.rpartition(".")
        parts = module.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            if path not in sys.modules or sys.modules[path] is before.get(path):
                sys.modules[path] = ModuleType(path)
        setattr(sys.modules[module], own_name, objects._stand_in(name))
    try:
        yield
    finally:
        objects._class_of.cache_clear()
        packages = {name.partition(".")[0] for name in names}
        for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
            del sys.modules[name]
        sys.modules.update({name: module for name, module in before.items() if name.partition(".")[0] in packages})


def made(class_name: str, state: Any) -> Any:
    """Return an object of one of DeepSpeed's classes."""
    return objects.build_object(next(name for _, name in objects.stand_ins() if name.endswith(f".{class_name}")), state)


def parameters(groups: tuple[Shapes, ...], step: int) -> Values:
    """Return weight and moments of each parameter after so many steps, all in float32."""
    values = {}
    for number, (name, shape) in enumerate(item for group in groups for item in group.items()):
        base, moved = (torch.Generator().manual_seed(seed) for seed in (number, 1000 * step + number))
        scale = torch.rand(shape[0], *[1] * (len(shape) - 1), generator=base) + 0.1
        noise = torch.randn(shape, generator=moved)
        weight = 0.05 * torch.randn(shape, generator=base) + 1e-4 * step * noise
        square = (1e-3 * scale * (1 + torch.rand(shape, generator=moved))) ** 2
        values[name] = {"weight": weight, "exp_avg": 1e-3 * scale * noise, "exp_avg_sq": square}
    return values


def write_zero(
    tag: Path,
    stage: int = 2,
    *,
    ranks: int = 2,
    step: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    groups: tuple[Shapes, ...] = GROUPS,
    values_of: Callable[[tuple[Shapes, ...], int], Values] = parameters,
    frozen: dict[str, Tensor] | None = None,
    tied: dict[str, str] | None = None,
    prefix: str = "bf16_",
    client_state: Any = None,
) -> Path:
    """Write a checkpoint of ZeRO into the directory of a tag, and return that."""
    tag.mkdir(parents=True, exist_ok=True)
    values, frozen, tied = values_of(groups, step), frozen or {}, tied or {}
    with pretended_packages():
        for rank in range(ranks):
            states = _states_of_third(values, groups, rank, ranks) if stage == 3 else {}
            states = states or _states_of_second(values, groups, rank, ranks, stage)
            for flat in states["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"]:
                flat.requires_grad_()
            state = {"optimizer_state_dict": states, "ds_config": {}, "ds_version": "0.19.8"}
            torch.save(state, tag / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        for rank in range(ranks if stage == 3 else 1):
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
            torch.save(_model(values, groups, frozen, tied, stage, dtype, ranks, step, client_state), tag / name)
    return tag


def _loss_scaler() -> Any:
    return made("LossScaler", {"cur_scale": 1.0, "dynamic": False})


def _optimizer(flats: dict[int, dict[str, Tensor]], count: int, step: int) -> dict[str, Any]:
    state = {index: {"step": torch.tensor(float(step)), **moments} for index, moments in flats.items()}
    settings = {"lr": 1e-3, "betas": (0.9, 0.999), **ADAM_SETTINGS}
    return {"state": state, "param_groups": [{**settings, "params": [index]} for index in range(count)]}


def _states_of_second(values: Any, groups: Any, rank: int, ranks: int, stage: int) -> dict[str, Any]:
    """Return the content that ZeRO 1 and 2 write: ranks cut each group of parameters as a whole."""
    weights, moments, paddings, mappings = [], {}, [], []
    for number, shapes in enumerate(groups):
        total = sum(math.prod(shape) for shape in shapes.values())
        length = -(-total // (2 * ranks)) * 2
        begin, stop = rank * length, min((rank + 1) * length, total)
        paddings.append(length - (stop - begin))
        flat = {
            key: torch.cat([values[name][key].flatten() for name in shapes] + [torch.zeros(length * ranks - total)])
            for key in ("weight", "exp_avg", "exp_avg_sq")
        }
        weights.append(flat["weight"][begin:stop].clone())
        moments[number] = {key: flat[key][begin : begin + length].clone() for key in ("exp_avg", "exp_avg_sq")}
        mapping, position = OrderedDict(), 0
        for name, shape in shapes.items():
            first, last = max(position, begin), min(position + math.prod(shape), begin + length)
            if first < last:
                mapping[name] = made("fragment_address", {"numel": last - first, "start": first - begin})
            position += math.prod(shape)
        mappings.append(mapping)
    return {
        "loss_scaler": _loss_scaler(),
        "dynamic_loss_scale": False,
        "overflow": False,
        "clip_grad": 1.0,
        "base_optimizer_state": _optimizer(moments, len(groups), 2),
        "single_partition_of_fp32_groups": weights,
        "zero_stage": made("ZeroStageEnum", stage),
        "group_paddings": paddings,
        "param_alignment_paddings": [[0] * len(shapes) for shapes in groups],
        "partition_count": [ranks] * len(groups),
        "ds_version": "0.19.8",
        "param_slice_mappings": mappings,
    }


def _states_of_third(values: Any, groups: Any, rank: int, ranks: int) -> dict[str, Any]:
    """Return the content that ZeRO 3 writes: ranks cut each parameter."""
    weights, moments = [], {}
    for number, shapes in enumerate(groups):
        keys = ("weight", "exp_avg", "exp_avg_sq")
        flat = {key: torch.cat([_slice(values[name][key], rank, ranks) for name in shapes]) for key in keys}
        weights.append(flat.pop("weight"))
        moments[number] = flat
    return {
        "zero_stage": made("ZeroStageEnum", 3),
        "loss_scaler": _loss_scaler(),
        "dynamic_loss_scale": False,
        "overflow": False,
        "partition_count": ranks,
        "optimizer_state_dict": _optimizer(moments, len(groups), 2),
        "fp32_flat_groups": weights,
    }


def _slice(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    length = -(-tensor.numel() // ranks)
    padded = torch.cat([tensor.flatten(), torch.zeros(length * ranks - tensor.numel(), dtype=tensor.dtype)])
    return padded[rank * length : (rank + 1) * length].clone()


def _model(
    values: Any,
    groups: Any,
    frozen: dict[str, Tensor],
    tied: dict[str, str],
    stage: int,
    dtype: torch.dtype,
    ranks: int,
    step: int,
    client_state: Any,
) -> dict[str, Any]:
    module: OrderedDict[str, Tensor] = OrderedDict(BUFFER)
    fragments = dict(frozen)
    for shapes in groups:
        # In training all weights of a group are views of one tensor, and torch.save keeps that.
        flat = torch.cat([values[name]["weight"].flatten() for name in shapes]).to(dtype)
        for name, part in zip(shapes, flat.split([math.prod(shape) for shape in shapes.values()]), strict=True):
            module[name] = torch.empty(0, dtype=dtype) if stage == 3 else part.view(shapes[name])
    for name, tensor in frozen.items():
        module[name] = torch.empty(0, dtype=dtype) if stage == 3 else tensor
        fragments[name] = _slice(tensor, 0, ranks) if stage == 3 else tensor
    module |= {name: module[owner] for name, owner in tied.items()}
    return {
        "module": module,
        "buffer_names": [*BUFFER],
        "optimizer": None,
        "param_shapes": [OrderedDict((name, torch.Size(shape)) for name, shape in shapes.items()) for shapes in groups],
        "frozen_param_shapes": OrderedDict((name, tensor.shape) for name, tensor in frozen.items()),
        "shared_params": dict(tied),
        "frozen_param_fragments": OrderedDict(fragments),
        "lr_scheduler": None,
        "global_steps": step,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": "0.19.8",
        **({"client": client_state} if client_state is not None else {}),
    }


def write_run(root: Path, stage: int = 2, count: int = 3, **options: Any) -> list[Path]:
    """Write several saves of one training, as tags side by side."""
    return [write_zero(root / f"global_step{2 * n}", stage, step=2 * n, **options) for n in range(1, count + 1)]


def in_trainer(root: Path, step: int, stage: int = 2, **options: Any) -> Path:
    """Write a checkpoint as a Trainer with DeepSpeed does, with a tag in it."""
    checkpoint = root / f"checkpoint-{step}"
    write_zero(checkpoint / f"global_step{step}", stage, step=step, **options)
    (checkpoint / "latest").write_text(f"global_step{step}")
    (checkpoint / "trainer_state.json").write_text(f'{{"global_step": {step}, "epoch": 0.5, "log_history": []}}')
    (checkpoint / "zero_to_fp32.py").write_text("# a program of DeepSpeed's\n")
    return checkpoint
