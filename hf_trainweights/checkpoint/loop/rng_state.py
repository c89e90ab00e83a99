"""The random number generators: Python's, torch's on CPU and CUDA, and numpy's where numpy is in use."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def rng_state() -> dict[str, Any]:
    """Return copies of the states of all random number generators, numpy's and CUDA's where they are in use."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = (name, torch.from_numpy(keys.copy()), *rest)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Set the random number generators to what `rng_state` returned."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np  # only here: torch works without numpy, and then no state of it was stored

        name, keys, *rest = state["numpy"]
        np.random.set_state((name, keys.numpy(), *rest))
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
