"""What ranks that hold parts of one model do: they fail alike, and the first one writes for all.

Also what Transformers' own parallelism asks of a quantizer: how it reads weights, wraps parts and runs modules; and
whether a Trainer's checkpoints are of one rank or of all.
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

    Transformers calls `contiguous` on it, which of a weight that is stored transposed would make float values. The
    stored tensors are contiguous already.
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
    """Make Transformers read some weights whole on every rank while it loads a model, and not this rank's part alone.

    Transformers asks the model's state dict what is a DTensor, and cuts what it reads for it as the values of a float
    weight lie. Stored tensors of a quantized weight lie otherwise. `choose` gets the distributed parameters by name and
    returns those to read whole. The handle that is returned ends it.
    """

    def show_plain(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: object) -> None:
        parts = {name: tensor for name, tensor in state_dict.items() if is_distributed(tensor)}
        for name in choose(parts) if parts and not prefix else ():
            state_dict[name] = torch.empty(parts[name].shape, dtype=parts[name].dtype, device="meta")

    return model.register_state_dict_post_hook(show_plain)


def plan_of(model: PreTrainedModel, name: str) -> str:
    """Return what cuts a weight: its style in the model's plan, or "its placements" where a version does not say."""
    plans: dict[str, str] = {**(getattr(model, "_ep_plan", None) or {}), **(getattr(model, "_tp_plan", None) or {})}
    pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    style = next((plans[key] for key in (name, pattern, pattern.rpartition(".")[0]) if key in plans), None)
    return "its placements" if style is None else f"the style {style!r} of the plan"


def run_on_parts(model: nn.Module) -> None:
    """Freeze the quantized parts of a model and make their modules multiply by them as they are, not by DTensors."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if is_distributed(parameter) and isinstance(local_tensor(parameter), QuantizedTensor):
                parameter.requires_grad_(False)
                # A table of embeddings is looked up as a DTensor, which leaves out the rows of other ranks.
                if not isinstance(module, nn.Embedding):
                    module._hf_quantized_needs_local_tp = True  # pyright: ignore[reportArgumentType]


def without_ranks(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy that shares all with a model, but which Transformers saves like one that is not distributed."""
    alone = shallow_copy(model)
    alone.config = copy.copy(model.config)
    alone.config.distributed_config = None
    return alone


@contextlib.contextmanager
def failing_alike(together: bool) -> Iterator[None]:
    """Raise on every rank what is raised on one of them within the context, so that none waits for one that has gone.

    If ranks work `together` at all, every one must enter it. What cannot be sent is raised as a `TrainWeightsError`.
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
    failure = failure or next((each for each in failures if each is not None), None)
    if failure is not None:
        raise failure


def _as_sent(error: BaseException | None) -> BaseException | None:
    """Return an error that other processes can unpickle."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        found = f"{type(error).__name__}: {error}"
        return TrainWeightsError("another rank", "no error", found, "See what that rank says.")
    return error


def is_in_parts(model: PreTrainedModel, given: Mapping[str, Any] | None = None) -> bool:
    """Return whether ranks hold parts of what is to be saved: the state dict that is given, else the model's own."""
    return any(is_distributed(tensor) for tensor in (model.parameters() if given is None else given.values()))


def gather_on_first_rank(model: PreTrainedModel, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the whole state dict of a model on the first rank, on all others an empty one; every rank must call it.

    One weight after another is gathered, as codes and scales, and put on the CPU; a tied one is under each of its
    names.
    """
    state_dict = dict(model.state_dict(keep_vars=True) if given is None else given)
    gathered: dict[int, Any] = {}
    for name, tensor in state_dict.items():
        if is_distributed(tensor):
            if id(tensor) not in gathered:
                whole = gather(tensor).detach()
                gathered[id(tensor)] = whole.cpu() if dist.get_rank() == 0 else None
            state_dict[name] = gathered[id(tensor)]
    if dist.get_rank() != 0:
        return {}
    return {name: tensor.detach() if isinstance(tensor, Tensor) else tensor for name, tensor in state_dict.items()}


def on_first_rank(work: Callable[[], _Result]) -> _Result | None:
    """Return on the first rank what a function returns, None on all others; its error is raised on every rank."""
    with failing_alike(together=True):
        return work() if dist.get_rank() == 0 else None


class Sharding(Enum):
    """What a Trainer writes into a checkpoint."""

    NONE = "files of one rank"
    FULL = "files of one rank, gathered from all (FSDP, FULL_STATE_DICT)"
    SHARDED = "DCP directories (FSDP, SHARDED_STATE_DICT)"
    OTHER = "something else (DeepSpeed, FSDP of XLA or with LOCAL_STATE_DICT), or nobody says where (a search)"


def sharding_of(args: Any) -> Sharding:
    """Return what a Trainer with these `TrainingArguments` writes; its accelerator exists."""
    state = AcceleratorState() if is_initialized() else None
    plugin = getattr(state, "fsdp_plugin", None)
    if plugin is None:
        # `accelerate launch` can ask for either without the arguments.
        is_deepspeed = getattr(getattr(state, "distributed_type", None), "name", "") == "DEEPSPEED"
        return Sharding.OTHER if is_deepspeed or args.deepspeed or args.fsdp else Sharding.NONE
    kinds = {"FULL_STATE_DICT": Sharding.FULL, "SHARDED_STATE_DICT": Sharding.SHARDED}
    shown = str(plugin.state_dict_type)
    return next((kind for name, kind in kinds.items() if name in shown), Sharding.OTHER)
