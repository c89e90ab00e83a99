"""How far a training loop has come through its data, and how it gets there again after a resume."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hf_trainweights.checkpoint.rng_state import rng_state, set_rng_state


@dataclass
class Progress:
    """How far training has come.

    Args:
        step: Batches consumed in all passes.
        passes: Passes over the loader that are complete.
        consumed: Batches consumed in the present pass.
        start: The random number generators when it began; None between two passes.
        passes_to_skip: After a resume, how many passes the loop has yet to ask for that are complete already.
        rng: After a resume, the generators as they were at the save, until they are set.
    """

    step: int = 0
    passes: int = 0
    consumed: int = 0
    start: dict[str, Any] | None = None
    passes_to_skip: int = 0
    rng: Mapping[str, Any] | None = None

    @classmethod
    def resumed(cls, step: int, position: Mapping[str, Any], rng: Mapping[str, Any]) -> Progress:
        """Return the progress of a run that goes on from a checkpoint.

        Args:
            step: The checkpoint's step.
            position: What `position` returned when it was saved.
            rng: The generators as they were then.
        """
        return cls(step, position["passes"], position["consumed"], position["start"], position["passes"], rng)

    def position(self) -> dict[str, Any]:
        """Return where in the data the run is, as values that a checkpoint can hold."""
        return {"passes": self.passes, "consumed": self.consumed, "start": self.start}

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
        for generator, state in zip(generators, self.start["loader"], strict=True):
            generator.set_state(state)
        batches = iter(loader)
        for _ in range(to_skip):
            next(batches, None)
        set_rng_state(rng)
        yield from batches


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the random number generators that a DataLoader was given for itself."""
    owners = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    owners.append(getattr(owners[-1], "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())
