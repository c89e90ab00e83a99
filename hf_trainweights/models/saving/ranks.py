"""What ranks that hold parts of one model do together: they fail alike, and the first one writes for all."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from hf_trainweights.errors import TrainWeightsError
from hf_trainweights.tensor.distributed.placements import is_distributed
from hf_trainweights.tensor.distributed.shards import gather

_Result = TypeVar("_Result")


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
