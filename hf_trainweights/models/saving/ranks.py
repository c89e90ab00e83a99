"""What ranks that hold parts of one model do together: they fail alike, and the first one writes for all."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from hf_trainweights.errors import SaveError, TrainWeightsError
from hf_trainweights.tensor.distributed.placements import is_distributed
from hf_trainweights.tensor.distributed.shards import gather

_Result = TypeVar("_Result")


@contextlib.contextmanager
def failing_alike(together: bool) -> Iterator[None]:
    """Raise on every rank what is raised on one of them within the context, so that none waits for one that has gone.

    If ranks work `together` at all, every one must enter it. What cannot be sent is raised as a `TrainWeightsError`.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    failures: list[Exception | None] = [failure]
    if together and dist.is_available() and dist.is_initialized():
        failures = [None] * dist.get_world_size()
        dist.all_gather_object(failures, _as_sent(failure))
    failure = failure or next((each for each in failures if each is not None), None)
    if failure is not None:
        raise failure


def _as_sent(error: Exception | None) -> Exception | None:
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


def is_first_rank() -> bool:
    """Return whether this process is the one that writes."""
    return dist.get_rank() == 0


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
                gathered[id(tensor)] = whole.cpu() if is_first_rank() else None
            state_dict[name] = gathered[id(tensor)]
    if not is_first_rank():
        return {}
    return {name: tensor.detach() if isinstance(tensor, Tensor) else tensor for name, tensor in state_dict.items()}


def on_first_rank(where: str, work: Callable[[], _Result]) -> _Result | None:
    """Do something on the first rank, and fail on every rank if it fails there; every rank must call it.

    Its result is returned there, None on all others. They raise a `SaveError` if it fails.
    """
    result: _Result | None = None
    failure: BaseException | None = None
    if is_first_rank():
        try:
            result = work()
        except BaseException as error:
            failure = error
    told = [None if failure is None else f"{type(failure).__name__}: {failure}"]
    dist.broadcast_object_list(told, src=0)
    if failure is not None:
        raise failure
    if told[0] is not None:
        raise SaveError(where, "rank 0 to write for all ranks", told[0], "See what rank 0 says.")
    return result
