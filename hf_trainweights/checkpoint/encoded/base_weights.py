"""`BaseWeights`: the weights outside a run that its files are stored against, read one tensor at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_trainweights.checkpoint.encoded.base_files import find_base
from hf_trainweights.checkpoint.encoded.base_identity import Base
from hf_trainweights.checkpoint.encoded.key_paths import corrupt
from hf_trainweights.checkpoint.encoded.reader import is_encoded, load_file
from hf_trainweights.checkpoint.encoded.storages import DTYPES

_STORABLE = frozenset(DTYPES.values())


class BaseWeights:
    """The weights of a base, read one at a time; they serve as an `Anchor` does.

    Args:
        base: The base.
        directory: A checkpoint directory that may keep its files.

    Attributes:
        base: The base.
        sha256: Its digest.
        files: Path of each file by its name.

    Raises:
        CorruptFileError: A file has changed, or holds something else than plain tensors.
        MissingAnchorError: A file is nowhere.
        OSError: A file cannot be read.
    """

    def __init__(self, base: Base, directory: Path):
        self.base, self.sha256 = base, base.sha256
        self.files = find_base(base, directory)
        self._readers: dict[str, Callable[[], Tensor]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, path in self.files.items():
            self._open(name, path)
        self._stored_names = {name: name for name in self._readers}

    def __contains__(self, name: object) -> bool:
        return name in self._stored_names

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored_names)

    def stored_name(self, name: str) -> str:
        """Return the name that a tensor has in the base's files."""
        return self._stored_names[name]

    def tensor(self, name: str) -> Tensor:
        """Return one tensor as stored, contiguous on the CPU, not to be written to: it may be mapped from a file."""
        if name not in self._stored_names:
            raise corrupt(str(self.base), f"a base that holds {name}", "others only")
        try:
            return self._readers[self._stored_names[name]]().detach().contiguous()
        except SafetensorError as error:
            raise corrupt(f"{self.base}, {name}", "a readable tensor", error) from error

    def named_as(self, weights: Mapping[str, Any]) -> Self:
        """Give the tensors the names that they have in a checkpoint's flat state dict; the others go.

        A model with a head has the weights of its base model under a prefix, and the other way round. A name goes
        before a name without or with the prefix, and a shape must fit. Of tied weights one is enough.
        """
        shapes = {name: tuple(each.shape) for name, each in weights.items() if isinstance(each, Tensor)}
        names = matching_names(shapes, self._shapes)
        places = {weights[name].data_ptr(): stored for name, stored in names.items() if weights[name].data_ptr()}
        tied = {name: places[weights[name].data_ptr()] for name in shapes if weights[name].data_ptr() in places}
        self._stored_names = {name: stored for name, stored in tied.items() if shapes[name] == self._shapes[stored]}
        self._stored_names |= names
        return self

    def _open(self, name: str, path: Path) -> None:
        try:
            if name.endswith(".safetensors"):
                self._add_safetensors(path)
            else:
                self._add_torch_file(path)
        except SafetensorError as error:
            raise corrupt(f"{name} of {self.base}", "a safetensors file", error) from error

    def _add_safetensors(self, path: Path) -> None:
        file = safe_open(path, framework="pt")
        for name in file.keys():  # noqa: SIM118 (it is no dict)
            self._readers[name] = lambda name=name: file.get_tensor(name)
            self._shapes[name] = tuple(file.get_slice(name).get_shape())

    def _add_torch_file(self, path: Path) -> None:
        state = None if is_encoded(path) else load_file(path, map_location="cpu", mmap=True)
        if not isinstance(state, dict):
            raise corrupt(f"{path} of {self.base}", "a plain state dict", type(state).__name__)
        for name, tensor in state.items():
            if isinstance(name, str) and type(tensor) in (Tensor, torch.nn.Parameter) and tensor.dtype in _STORABLE:
                self._readers[name] = lambda tensor=tensor: tensor
                self._shapes[name] = tuple(tensor.shape)


def matching_names(weights: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return which weights of a checkpoint other files have, by shape and name, which may differ by one prefix.

    Both arguments are shapes by name; the result is the name in the other files by that in the checkpoint.

    Examples:
        >>> matching_names({"bert.pooler.weight": (2, 2), "head.weight": (3, 2)}, {"pooler.weight": (2, 2)})
        {'bert.pooler.weight': 'pooler.weight'}
    """
    # One prefix for all: a name that happens to end like another would be a bad reference.
    (more, added), (less, removed) = _commonest_prefix(weights, stored), _commonest_prefix(stored, weights)
    found = {}
    for name, shape in weights.items():
        renamed = name.removeprefix(added) if more > less else removed + name
        stored_name = name if stored.get(name) == shape else renamed
        if stored.get(stored_name) == shape:
            found[name] = stored_name
    return found


def _commonest_prefix(longer: Mapping[str, tuple[int, ...]], shorter: Mapping[str, tuple[int, ...]]) -> tuple[int, str]:
    """Return the prefix that most names in `longer` have before a name in `shorter`, and how many have it."""
    prefixes: Counter[str] = Counter()
    for name, shape in longer.items():
        parts = name.split(".")
        for count in range(1, len(parts)):
            if shorter.get(".".join(parts[count:])) == shape:
                prefixes[".".join(parts[:count]) + "."] += 1
    return max(((count, prefix) for prefix, count in prefixes.items()), default=(0, ""))
