"""The tensors of a checkpoint that somebody else wrote: checked first, then read one by one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.files.reading import is_torch_zip
from hf_trainweights.files.weight_files import ENTRY_POINTS, shard_names
from hf_trainweights.imports.layouts.base import AGAIN
from hf_trainweights.models.loading.stored_weights import check_weight_files

_MODEL_FILES = ENTRY_POINTS[:4]


class Source:
    """The tensors of a model's weight files, safetensors or `.bin`, whole or sharded; nothing in them is executed.

    ConfigError: there are no files under names that Transformers looks for. CorruptFileError: one is missing, damaged,
    no regular file, or holds more than plain tensors; or two have a tensor of the same name.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._readers: dict[str, Callable[[str], Tensor]] = {}
        self.metadata: dict[str, str] = {}
        self.size_bytes = 0
        for path in _weight_files(directory):
            self.size_bytes += path.stat().st_size
            readers, metadata = _readers(path)
            for name in readers.keys() & self._readers.keys():
                next_step = "Download the model again, or save it again from its source."
                raise CorruptFileError(str(path), f"{name} in one file", "it in several", next_step)
            self._readers |= readers
            self.metadata |= metadata

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""
        return self._readers.keys()

    def tensor(self, name: str) -> Tensor:
        """Return a tensor by its name, a view of the mapped file."""
        with torch.device("cpu"):  # else safetensors makes it on the default device
            return self._readers[name](name)

    def modules(self) -> dict[str, dict[str, str]]:
        """Return the tensors by the module that they belong to: module to last part of the name to whole name."""
        modules: dict[str, dict[str, str]] = defaultdict(dict)
        for name in sorted(self._readers):
            module, _, leaf = name.rpartition(".")
            modules[module][leaf] = name
        return dict(modules)


def _readers(path: Path) -> tuple[dict[str, Callable[[str], Tensor]], dict[str, str]]:
    """Return by name what reads each tensor of a file, and the metadata of its header."""
    if path.suffix == ".safetensors":
        file: Any = safe_open(path, framework="pt")
        get: Callable[[str], Tensor] = file.get_tensor
        return dict.fromkeys(file.keys(), get), file.metadata() or {}
    loaded = torch.load(path, weights_only=True, map_location="cpu", mmap=is_torch_zip(path) or None)
    tensors = {name: tensor for name, tensor in loaded.items() if isinstance(tensor, Tensor)}
    for name, tensor in tensors.items():
        plain = tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type == "cpu"
        if not isinstance(name, str) or not plain:
            found = f"{name!r} to a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device.type}"
            raise CorruptFileError(str(path), "names to plain tensors with values", found, AGAIN)
    return dict.fromkeys(tensors, tensors.__getitem__), {}


def _weight_files(directory: Path) -> list[Path]:
    entry = next((directory / name for name in _MODEL_FILES if (directory / name).exists()), None)
    if entry is None:
        next_step = "Rename a single file to model.safetensors; of a model in another layout download the original."
        raise ConfigError(str(directory), f"one of {', '.join(_MODEL_FILES)}", "none", next_step)
    files = [directory / name for name in shard_names(entry)] if entry.suffix == ".json" else [entry]
    check_weight_files(files, directory)
    return files
