"""The tensors of a sharded checkpoint, each put together from the parts of its ranks when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from hf_trainweights.checkpoint.dcp.contents import ShardedContents, all_weights, optimizer_tensors
from hf_trainweights.inspection.stored_tensors import StoredTensor, read_tensors

_NAMES = {"weights": all_weights, "optimizer": optimizer_tensors}


class ShardedTensors(Mapping[str, StoredTensor]):
    """One part of a DCP directory, plain or encoded, by the names of its tensors; none stays in memory.

    Without `values` the tensors are on the meta device.
    """

    def __init__(self, directory: Path, part: str, *, values: bool = True):
        self._contents = ShardedContents(directory)
        prefix = "" if part == "weights" else f"{part}: "
        self._names = {f"{prefix}{name}": stored for name, stored in _NAMES[part](self._contents).items()}
        self._values = values

    def __getitem__(self, key: str) -> StoredTensor:
        name = self._names[key]
        entry = self._contents.tensors[name]
        meta = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        tensor = self._contents.read_tensor(name) if self._values else meta
        return StoredTensor(key, tensor, self._contents.stored_bytes(name), self._contents.directory)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_part(files: Sequence[Path], part: str) -> Mapping[str, StoredTensor]:
    """Return the tensors of one part of a checkpoint by name; those of a DCP directory are read at each access."""
    if files and files[0].is_dir():
        return ShardedTensors(files[0], part)
    return {stored.key: stored for file in files for stored in read_tensors(file, part)}
