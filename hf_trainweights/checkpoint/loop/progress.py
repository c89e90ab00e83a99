"""The progress of a training loop through its data and random numbers, and the way back to it after a resume."""

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
    """The progress of training: `step` counts batches in all passes, `consumed` those in the present pass.

    `passes` counts complete passes. `start` has the states of the random number generators at the beginning of the
    present pass; None between two passes. After a resume, `passes_to_skip` is the number of complete passes that the
    loop has not asked for again yet, and `rng` has the generators' states at the save until they are set.
    """

    step: int = 0
    passes: int = 0
    consumed: int = 0
    start: dict[str, Any] | None = None
    passes_to_skip: int = 0
    rng: Mapping[str, Any] | None = None

    @classmethod
    def resumed(cls, path: str, checkpoint: Mapping[str, Any], ranks: Ranks) -> Progress:
        """Return the progress of this rank in a run that resumes from a checkpoint of a manager.

        ConfigError: no manager wrote the checkpoint, or a manager on another number of ranks.
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
        """Return the `position` in the data and the present generators' states, for `state_from_bytes` on any rank."""
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
        """Yield the remaining batches of the present pass."""
        rng, self.rng = self.rng, None
        end_workers(loader)
        generators = _generators(loader)
        if self.start is None:
            if rng is not None:
                set_rng_state(rng)
            self.start = {"rng": rng_state(), "loader": [generator.get_state() for generator in generators]}
            yield from loader
            return
        # An iterator that this process has read from continues where it is; any other loader begins from the start.
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
    """One pass over a loader. It raises an error if a loop continues it after `close`, as that would miss batches."""

    def __init__(self, steps: Generator[tuple[int, Any], None, None]):
        self._steps = steps
        self._ended_by: str | None = None

    def __next__(self) -> tuple[int, Any]:
        if self._ended_by is not None:
            next_step = "Finish a pass or leave it before the next one begins, and read other data without the manager."
            raise ConfigError("CheckpointManager.steps", "one pass at a time", self._ended_by, next_step)
        return next(self._steps)

    def close(self, why: str | None = None) -> None:
        """End the pass; if it is not complete, a loop that asks for another batch gets `why` in an error."""
        if inspect.getgeneratorstate(self._steps) != inspect.GEN_CLOSED:  # a closed generator is a complete pass
            self._ended_by = why
        self._steps.close()


@dataclass(frozen=True)
class Boundary:
    """The state of a loop right after an optimizer's step, as far as batches of a half summed gradient change it."""

    step: int
    state: bytes
    buffers: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, progress: Progress, model: nn.Module) -> Boundary:
        """Return the present state of a loop."""
        buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers(remove_duplicate=False)}
        return cls(progress.step, progress.state_bytes(), buffers)


def state_from_bytes(data: bytes) -> dict[str, Any]:
    """Read `position` and `rng` of a rank from its `Progress.state_bytes`.

    PyTorch's collectives could pickle them, but cannot unpickle the uint32 tensor with numpy's state.
    """
    return torch.load(io.BytesIO(data), weights_only=True)


def end_workers(loader: Any) -> None:
    """End the workers that a DataLoader keeps from pass to pass, so that each pass starts new ones.

    The random numbers of kept workers continue from pass to pass, so a resume would have to load all passes again. New
    workers get a seed from the random numbers of this process. UnsupportedError: the loader does not show its workers.
    """
    owners: tuple[Any, Any] = loader, getattr(loader, "base_dataloader", None)  # accelerate wraps the loader
    for owner in owners:
        if not getattr(owner, "persistent_workers", False):
            continue
        if not hasattr(owner, "_iterator"):
            next_step = "Build the loader with persistent_workers=False."
            kind = f"a {type(owner).__name__} that keeps its workers"
            raise UnsupportedError("the loader", "workers that can be started anew", kind, next_step)
        owner._iterator = None


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the random number generators that were passed to a DataLoader or its samplers."""
    owners = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    owners.append(getattr(owners[-1], "sampler", None))
    generators = [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in generators if isinstance(g, torch.Generator)}.values())


def rng_state() -> dict[str, Any]:
    """Return copies of the states of all random number generators, including CUDA's if they are in use."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    name, keys, *rest = cast(tuple[Any, ...], np.random.get_state())
    state["numpy"] = (name, torch.from_numpy(keys.copy()), *rest)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Set the random number generators to states from `rng_state`; earlier versions could leave numpy's out."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, keys.numpy(), *rest))
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
