"""How far a training loop has come through its data, its random numbers, and how it gets there again."""

from __future__ import annotations

import inspect
import io
import random
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from hf_trainweights.checkpoint.run.ranks import Ranks
from hf_trainweights.errors import ConfigError, UnsupportedError

_POSITION = {"passes", "consumed", "start"}


@dataclass
class Progress:
    """How far training has come: batches in all passes, complete passes, and batches in the present one.

    `start` are the random number generators when it began; None between two passes. After a resume, `passes_to_skip`
    are complete already, but the loop has yet to ask for them, and `rng` are the generators as they were at the save,
    until they are set.
    """

    step: int = 0
    passes: int = 0
    consumed: int = 0
    start: dict[str, Any] | None = None
    passes_to_skip: int = 0
    rng: Mapping[str, Any] | None = None

    @classmethod
    def resumed(cls, path: str, checkpoint: Mapping[str, Any], ranks: Ranks) -> Progress:
        """Return the progress of this rank in a run that goes on from a manager's checkpoint.

        ConfigError: no manager wrote it, or one of another number of ranks.
        """
        extra = checkpoint.get("extra")
        extra = extra if isinstance(extra, dict) else {}
        position = extra.get("position")
        if not isinstance(position, dict) or not position.keys() >= _POSITION or "rng" not in checkpoint:
            next_step = "Restore it with restore_checkpoint, and give this run a directory of its own."
            raise ConfigError(path, "a checkpoint of a CheckpointManager", "one of save_checkpoint", next_step)
        states = [{"position": position, "rng": checkpoint["rng"]}, *extra.get("ranks", ())]
        if len(states) != ranks.size:
            next_step = "Resume on as many ranks, or restore it with restore_checkpoint and start a run of its own."
            raise ConfigError(path, f"a checkpoint of {ranks.size} ranks", f"one of {len(states)}", next_step)
        position, rng = states[ranks.rank]["position"], states[ranks.rank]["rng"]
        passes = position["passes"]
        return cls(checkpoint["step"], passes, position["consumed"], position["start"], passes, rng)

    def state_bytes(self) -> bytes:
        """Return `position` in the data, and generators as they are now, for another rank: see `state_from_bytes`."""
        position, file = {"passes": self.passes, "consumed": self.consumed, "start": self.start}, io.BytesIO()
        torch.save({"position": position, "rng": rng_state()}, file)
        return file.getvalue()

    def count_batch(self) -> None:
        """Count a batch as consumed."""
        self.step += 1
        self.consumed += 1

    def count_pass(self) -> None:
        """Count the present pass as complete."""
        self.passes += 1
        self.consumed = 0
        self.start = None

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of the present pass that are left."""
        rng, self.rng = self.rng, None
        end_workers(loader)
        generators = _generators(loader)
        if self.start is None:
            if rng is not None:
                set_rng_state(rng)
            self.start = {"rng": rng_state(), "loader": [generator.get_state() for generator in generators]}
            yield from loader
            return
        # An iterator that this process has begun stands where it should; anything else starts over.
        to_skip = 0 if rng is None and isinstance(loader, Iterator) else self.consumed
        rng = rng or rng_state()
        set_rng_state(self.start["rng"])
        states = self.start["loader"]
        if len(states) != len(generators):
            expected = f"{len(states)} random number generators of its own, as when its pass began"
            raise ConfigError("the loader", expected, f"{len(generators)}", "Build the loader as it was then.")
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        batches = iter(loader)
        for _ in range(to_skip):
            next(batches, None)
        set_rng_state(rng)
        yield from batches


class Pass(Iterator[tuple[int, Any]]):
    """One pass over a loader. A loop that goes on with it after it was ended from outside would miss batches."""

    def __init__(self, steps: Generator[tuple[int, Any], None, None]):
        self._steps = steps
        self._ended_by: str | None = None

    def __next__(self) -> tuple[int, Any]:
        if self._ended_by is not None:
            next_step = "Finish a pass or leave it before the next one begins, and read other data without the manager."
            raise ConfigError("CheckpointManager.steps", "one pass at a time", self._ended_by, next_step)
        return next(self._steps)

    def close(self, why: str | None = None) -> None:
        """End the pass. A loop that asks for more of it gets `why` in an error."""
        if inspect.getgeneratorstate(self._steps) != inspect.GEN_CLOSED:  # then it is complete
            self._ended_by = why
        self._steps.close()


@dataclass(frozen=True)
class Boundary:
    """A loop right after an optimizer's step: what the batches of a half summed gradient change since then."""

    step: int
    state: bytes
    buffers: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, progress: Progress, model: nn.Module) -> Boundary:
        """Return the present state of a loop."""
        buffers = {name: each.detach().clone() for name, each in model.named_buffers(remove_duplicate=False)}
        return cls(progress.step, progress.state_bytes(), buffers)


def state_from_bytes(data: bytes) -> dict[str, Any]:
    """Return `position` and `rng` of a rank, from its `Progress.state_bytes`.

    PyTorch's collectives pickle objects themselves, but they cannot read the uint32 tensor again that holds numpy's
    state.
    """
    return torch.load(io.BytesIO(data), weights_only=True)


def end_workers(loader: Any) -> None:
    """End the workers that a DataLoader keeps from pass to pass, so that each pass starts new ones.

    Their random numbers run on from pass to pass, and a resume cannot get there without loading all passes again. New
    workers begin with a seed that the random numbers of this process give. UnsupportedError: the loader hides them.
    """
    owners: tuple[Any, Any] = loader, getattr(loader, "base_dataloader", None)  # accelerate wraps the loader
    for owner in owners:
        if not getattr(owner, "persistent_workers", False):
            continue
        if not hasattr(owner, "_iterator"):
            next_step = "Build the loader with persistent_workers=False."
            found = f"a {type(owner).__name__} that keeps its workers"
            raise UnsupportedError("the loader", "workers that can be started anew", found, next_step)
        owner._iterator = None


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the random number generators that a DataLoader was given for itself."""
    owners = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    owners.append(getattr(owners[-1], "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def rng_state() -> dict[str, Any]:
    """Return copies of the states of all random number generators, CUDA's where they are in use."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    name, keys, *rest = cast(tuple[Any, ...], np.random.get_state())
    state["numpy"] = (name, torch.from_numpy(keys.copy()), *rest)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Set the random number generators to what `rng_state` returned; earlier versions could leave numpy's out."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, keys.numpy(), *rest))
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
