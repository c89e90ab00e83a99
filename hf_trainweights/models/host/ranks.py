"""Ranks that hold parts of one model: an error of one is raised by all, and the first writes files for all.

Functions here also prepare quantized weights for models that Transformers itself distributes while it loads them, and
find out whether one rank or all ranks write a Trainer's checkpoints.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, is_initialized
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hf_trainweights.errors import TrainWeightsError
from hf_trainweights.models.host.models import shallow_copy
from hf_trainweights.tensor.distributed.placements import is_distributed, local_tensor
from hf_trainweights.tensor.distributed.shards import gather
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

_Result = TypeVar("_Result")


class LocalPart:
    """A rank's part of a weight on its way into the model, where Transformers wraps it as a DTensor.

    Transformers calls `contiguous` on it. That would dequantize a weight that is stored transposed. The stored tensors
    are contiguous already, so this class returns the part unchanged.
    """

    def __init__(self, part: Tensor):
        self.part = part

    @property
    def shape(self) -> torch.Size:
        """Shape of the part."""
        return self.part.shape

    def to(self, device: Any) -> LocalPart:
        """Return the part on another device."""
        return LocalPart(self.part.to(device))

    def contiguous(self) -> Tensor:
        """Return the part itself."""
        return self.part


def is_loaded_by_ranks(model: PreTrainedModel) -> bool:
    """Return whether Transformers distributes a model over ranks while it loads it; False where a version cannot."""
    return getattr(model.config, "distributed_config", None) is not None


def read_whole(model: PreTrainedModel, choose: Callable[[Mapping[str, Any]], Iterable[str]]) -> RemovableHandle:
    """Make Transformers read some weights unsharded on every rank while it loads a model, not only this rank's part.

    Transformers finds the DTensors in the model's state dict, and cuts the tensors that it reads for them like float
    weights. Stored tensors of a quantized weight are arranged differently. `choose` gets the distributed parameters by
    name and returns the names of those to read unsharded. The returned handle removes the hook.
    """

    def show_plain(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: object) -> None:
        parts = {name: tensor for name, tensor in state_dict.items() if is_distributed(tensor)}
        for name in choose(parts) if parts and not prefix else ():
            state_dict[name] = torch.empty(parts[name].shape, dtype=parts[name].dtype, device="meta")

    return model.register_state_dict_post_hook(show_plain)


def plan_of(model: PreTrainedModel, name: str) -> str:
    """Return how errors name the rule that cuts a weight: by its style in the model's plan, if the version has one."""
    plans: dict[str, str] = {**(getattr(model, "_ep_plan", None) or {}), **(getattr(model, "_tp_plan", None) or {})}
    pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    style = next((plans[key] for key in (name, pattern, pattern.rpartition(".")[0]) if key in plans), None)
    return "its placements" if style is None else f"the style {style!r} of the plan"


def run_on_parts(model: nn.Module) -> None:
    """Freeze the quantized parts of a model, and make modules multiply by the local parts instead of DTensors."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if is_distributed(parameter) and isinstance(local_tensor(parameter), QuantizedTensor):
                parameter.requires_grad_(False)
                # An embedding stays a DTensor: its look-up leaves out the rows of other ranks.
                if not isinstance(module, nn.Embedding):
                    module._hf_quantized_needs_local_tp = True  # pyright: ignore[reportArgumentType]


def without_ranks(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy that shares all with a model, but that Transformers saves like one that is not distributed."""
    alone = shallow_copy(model)
    alone.config = copy.copy(model.config)
    alone.config.distributed_config = None
    return alone


@contextlib.contextmanager
def failing_alike(together: bool) -> Iterator[None]:
    """Raise an error of one rank within the context on every rank, so that no rank waits for one that has left.

    If ranks work `together`, each of them must enter the context. An error that cannot be pickled reaches other ranks
    as a `TrainWeightsError`.
    """
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
    failures: list[BaseException | None] = [failure]
    if together and dist.is_available() and dist.is_initialized():
        failures = [None] * dist.get_world_size()
        dist.all_gather_object(failures, _as_sent(failure))
    failure = failure or next((error for error in failures if error is not None), None)
    if failure is not None:
        raise failure


def _as_sent(error: BaseException | None) -> BaseException | None:
    """Return an error that other processes can unpickle: this one, or one with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        text = f"{type(error).__name__}: {error}"
        return TrainWeightsError("another rank", "no error", text, "See what that rank says.")
    return error


def is_in_parts(model: PreTrainedModel, state_dict: Mapping[str, Any] | None = None) -> bool:
    """Return whether ranks hold parts of the tensors of a state dict, or of the model's parameters without one."""
    return any(is_distributed(tensor) for tensor in (model.parameters() if state_dict is None else state_dict.values()))


def gather_on_first_rank(model: PreTrainedModel, state_dict: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the unsharded state dict of a model on the first rank, an empty one on others. Every rank must call it.

    It gathers one weight after another, as codes and scales, and puts it on the CPU. A tied weight is under each of its
    names.
    """
    tensors = dict(model.state_dict(keep_vars=True) if state_dict is None else state_dict)
    gathered: dict[int, Any] = {}
    for name, tensor in tensors.items():
        if is_distributed(tensor):
            if id(tensor) not in gathered:
                unsharded = gather(tensor).detach()
                gathered[id(tensor)] = unsharded.cpu() if dist.get_rank() == 0 else None
            tensors[name] = gathered[id(tensor)]
    if dist.get_rank() != 0:
        return {}
    return {name: tensor.detach() if isinstance(tensor, Tensor) else tensor for name, tensor in tensors.items()}


def on_first_rank(work: Callable[[], _Result]) -> _Result | None:
    """Call a function on the first rank and return its result, None on others. Every rank raises its error."""
    with failing_alike(together=True):
        return work() if dist.get_rank() == 0 else None


class Sharding(Enum):
    """The kind of files that a Trainer writes into a checkpoint."""

    NONE = "files of one rank"
    FULL = "files of one rank, gathered from all (FSDP, FULL_STATE_DICT)"
    SHARDED = "files of all ranks (FSDP with SHARDED_STATE_DICT, DeepSpeed)"
    OTHER = "something else (FSDP of XLA or with LOCAL_STATE_DICT), or nobody says where (a search)"


def sharding_of(args: Any) -> Sharding:
    """Return the kind of files that a Trainer with these `TrainingArguments` writes. Its accelerator must exist."""
    state = AcceleratorState() if is_initialized() else None
    plugin = getattr(state, "fsdp_plugin", None)
    if plugin is None:
        # `accelerate launch` can choose DeepSpeed or FSDP, too. Then the arguments of the Trainer do not show it.
        is_deepspeed = getattr(getattr(state, "distributed_type", None), "name", "") == "DEEPSPEED"
        if is_deepspeed or args.deepspeed:
            return Sharding.SHARDED
        return Sharding.OTHER if args.fsdp else Sharding.NONE
    kinds = {"FULL_STATE_DICT": Sharding.FULL, "SHARDED_STATE_DICT": Sharding.SHARDED}
    shown = str(plugin.state_dict_type)
    return next((kind for name, kind in kinds.items() if name in shown), Sharding.OTHER)
