"""State dicts of a small model and its optimizer, sharded over any number of ranks, and what comes back of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from trees import ADAM_SETTINGS

from hf_trainweights.distributed import TrainWeightsReader, TrainWeightsWriter

BETAS = (0.9, 0.95)
# Rows that no number of ranks divides, too few for 4 ranks, columns, a dtype of 16 bits, integers, no dimensions.
WEIGHTS: dict[str, tuple[tuple[int, ...], torch.dtype, Placement]] = {
    "embed.weight": ((130, 96), torch.float32, Shard(0)),
    "up.weight": ((96, 128), torch.float32, Shard(1)),
    "down.weight": ((128, 96), torch.bfloat16, Shard(0)),
    "gate.weight": ((3, 4096), torch.float32, Shard(0)),
    "norm.weight": ((96,), torch.float32, Replicate()),
    "steps": ((7,), torch.int64, Shard(0)),
    "scale": ((), torch.float32, Replicate()),
}
TRAINED = [name for name, (_, dtype, _) in WEIGHTS.items() if dtype.is_floating_point]


def whole_state(save: int = 0) -> dict[str, Any]:
    """Return the state of the n-th save of a run as plain tensors: its weights move a little from save to save."""
    start, noise = torch.Generator().manual_seed(0), torch.Generator().manual_seed(100 + save)
    model, states = {}, {}
    for name, (shape, dtype, _) in WEIGHTS.items():
        tensor = torch.randn(shape, generator=start) + 1e-3 * save * torch.randn(shape, generator=noise)
        model[name] = (tensor * 10).to(dtype) if not dtype.is_floating_point else tensor.to(dtype)
    for name in TRAINED:
        shape, dtype, _ = WEIGHTS[name]
        second = torch.rand(shape, generator=noise) * 1e-6
        first = second.sqrt() * torch.randn(shape, generator=noise)
        states[name] = {"step": torch.tensor(save + 1.0), "exp_avg": first.to(dtype), "exp_avg_sq": second.to(dtype)}
    groups = [{"lr": 1e-3, "betas": list(BETAS), **ADAM_SETTINGS, "params": TRAINED}]
    return {"model": model, "optim": {"state": states, "param_groups": groups}, "progress": {"save": save, "loss": 1.5}}


def empty_state() -> dict[str, Any]:
    """Return a state of the same names whose values all differ from those of any save."""
    return _map(whole_state(), lambda tensor: torch.full_like(tensor, 77), lambda _: None)


def sharded(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with its weights and moments cut over all ranks as the table says."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def cut(name: str, tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor, mesh, [WEIGHTS[name][2]])

    model = {name: cut(name, tensor) for name, tensor in state["model"].items()}
    states = {
        name: {key: tensor if key == "step" else cut(name, tensor) for key, tensor in values.items()}
        for name, values in state["optim"]["state"].items()
    }
    return {**state, "model": model, "optim": {**state["optim"], "state": states}}


def save(path: Path, state: Mapping[str, Any], mode: str = "lossless", **options: Any) -> None:
    """Save a state as it is: of DTensors from all ranks, of plain tensors from this process."""
    writer = TrainWeightsWriter(path, mode, **options)
    state_dict_saver.save(dict(state), storage_writer=writer, no_dist=not dist.is_initialized())


def load(path: Path, reader: type = TrainWeightsReader, state: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what a reader finds, as plain whole tensors."""
    loaded = dict(empty_state() if state is None else state)
    loaded = sharded(loaded) if dist.is_initialized() and state is None else loaded
    state_dict_loader.load(loaded, storage_reader=reader(path), no_dist=not dist.is_initialized())
    return _map(loaded, lambda each: each.full_tensor() if isinstance(each, DTensor) else each, lambda value: value)


def failures(action: Callable[[], object]) -> dict[int, BaseException]:
    """Return what DCP's exception holds of a save or a load, by the rank that failed; nothing if it succeeds."""
    try:
        action()
    except CheckpointException as error:
        return {rank: failure for rank, (failure, _) in error.failures.items()}
    return {}


def differing(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Return the names of what differs in any bit."""
    wanted = dict(leaves(expected))
    return [name for name, value in leaves(found) if not _is_same(value, wanted[name])]


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value that is no dict, by its dotted name."""
    for key, item in value.items():
        path = f"{name}.{key}" if name else key
        yield from leaves(item, path) if isinstance(item, Mapping) else [(path, item)]


def without_process_group() -> warnings.catch_warnings[None]:
    """Return a context in which DCP says nothing about the missing process group, which these tests mean."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def _is_same(first: Any, second: Any) -> bool:
    if not isinstance(first, Tensor):
        return first == second
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


def _map(value: Any, of_tensor: Any, of_other: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _map(item, of_tensor, of_other) for key, item in value.items()}
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return [_map(item, of_tensor, of_other) for item in value]
    return of_tensor(value) if isinstance(value, Tensor) else of_other(value)
