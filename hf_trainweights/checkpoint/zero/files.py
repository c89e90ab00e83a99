"""The files of a ZeRO checkpoint: the directories (tags) that have them, their ranks, and their content.

| file in a tag's directory | content |
|---|---|
| `..zero_pp_rank_<r>_mp_rank_<m>_optim_states.pt` | float32 weights and optimizer states of one rank |
| `mp_rank_<m>_model_states.pt` (ZeRO 0 to 2) | weights in the dtype of training, progress |
| `zero_pp_rank_<r>_mp_rank_<m>_model_states.pt` (ZeRO 3) | buffers and frozen weights of one rank, progress |
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hf_trainweights.checkpoint.encoded.objects import stand_ins
from hf_trainweights.checkpoint.encoded.reader import load_file
from hf_trainweights.errors import CorruptFileError

_STATES = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


def tag_directories(path: Path) -> list[Path]:
    """Return the directories of a checkpoint that DeepSpeed wrote, sorted: itself, or those in it; may be empty."""
    if not path.is_dir():
        return []
    # If `path` is the directory of a run, its checkpoints do not count.
    children = (child for child in path.iterdir() if not child.name.startswith("checkpoint-"))
    return [path] if _is_tag(path) else sorted(filter(_is_tag, children))


def _is_tag(path: Path) -> bool:
    return path.is_dir() and any(_MODEL.fullmatch(child.name) for child in path.glob("*_model_states.pt"))


def load_states(path: Path, *, map_location: str = "cpu") -> Any:
    """Load a file of DeepSpeed, plain or encoded, without running its code; tensors of a plain one are mapped.

    In a plain file stand-ins take the place of DeepSpeed's objects. CorruptFileError: it is damaged, or holds other
    objects.
    """
    with torch.serialization.safe_globals(stand_ins()):
        return load_file(path, map_location=map_location, mmap=True)


class TagFiles:
    """The files of one tag, by name."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.states: dict[str, tuple[int, int]] = {}  # the rank of each file, among the data and the model parallel
        self.models: dict[str, tuple[int | None, int]] = {}
        for path in sorted(directory.iterdir()):
            if match := _STATES.fullmatch(path.name):
                self.states[path.name] = int(match[1]), int(match[2])
            elif match := _MODEL.fullmatch(path.name):
                self.models[path.name] = int(match[1]) if match[1] else None, int(match[2])

    @property
    def names(self) -> list[str]:
        """The names of all files."""
        return [*self.states, *self.models]

    def outline(self, model_rank: int) -> Mapping[str, Any]:
        """Return the content of the first model file of a model parallel rank, its tensors on "meta"; empty if none.

        CorruptFileError: it cannot be read.
        """
        return self._outlines.get(model_rank, {})

    @cached_property
    def _outlines(self) -> dict[int, Mapping[str, Any]]:
        first = {model_rank: name for name, (_, model_rank) in reversed(self.models.items())}
        loaded = {rank: load_states(self.directory / name, map_location="meta") for rank, name in first.items()}
        return {rank: content for rank, content in loaded.items() if isinstance(content, Mapping)}

    @property
    def step(self) -> int | None:
        """The training steps done; None if no file says so."""
        steps = next((outline.get("global_steps") for outline in self._outlines.values()), None)
        return steps if type(steps) is int else None

    def missing(self) -> str | None:
        """Return which file is missing, or why a file cannot be read; None if all ranks have theirs."""
        ranks: dict[int, set[int]] = defaultdict(set)
        for rank, model_rank in self.states.values():
            ranks[model_rank].add(rank)
        try:
            for model_rank in {model_rank for _, model_rank in self.models.values()} | ranks.keys():
                world_size = self.outline(model_rank).get("dp_world_size")
                if not self.outline(model_rank):
                    return f"the model states of mp_rank {model_rank:02d} are missing"
                if not self.states:  # without ZeRO one file has all
                    continue
                count = world_size if type(world_size) is int else max(ranks[model_rank], default=0) + 1
                for rank in range(count):
                    if rank not in ranks[model_rank]:
                        return f"the optimizer states of rank {rank}, mp_rank {model_rank:02d}, are missing"
                if None not in (own := {rank for rank, other in self.models.values() if other == model_rank}):
                    for rank in sorted(set(range(count)) - own):
                        return f"the model states of rank {rank}, mp_rank {model_rank:02d}, are missing"
        except (CorruptFileError, OSError) as error:
            return str(error)
        return None
