"""The weight files of a checkpoint directory as loaders find them, and what they hold, plain or encoded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from hf_trainweights.checkpoint.encoded.reader import load_file
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.regular_files import require_regular_file
from hf_trainweights.files.weight_files import ENTRY_POINTS, shard_names


def weight_files(path: Path) -> list[Path]:
    """List weight files of one family, the one that loaders open first at the head, indices before their shards.

    CorruptFileError: an index cannot be read.
    """
    present = [name for name in ENTRY_POINTS if (path / name).is_file()]
    family = [name for name in present if name.startswith("adapter") == present[0].startswith("adapter")]
    files = [path / name for name in family]
    for index in [file for file in files if file.name.endswith(".index.json")]:
        with _readable(index):
            files += [path / shard for shard in shard_names(index) if (path / shard).is_file()]
    return files


def read_weights(first: Path) -> dict[str, Any]:
    """Return the state dict in a weight file, or in the shards of an index, on the CPU, mapped where it can be."""
    state: dict[str, Any] = {}
    with _readable(first):
        for name in shard_names(first) if first.name.endswith(".index.json") else [first.name]:
            state |= _read_weight_file(first.parent / name)
    return state


def load_if_possible(path: Path) -> Any:
    """Load a torch file as `load_file` does, mapped and on the CPU; None if it holds more than data, or is none."""
    try:
        return _load_mapped(path)
    except CorruptFileError:
        return None


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn the errors that a damaged weight file or index causes into a CorruptFileError."""
    try:
        yield
    except CorruptFileError:
        raise
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        next_step = "Use another checkpoint, or restore this one from a copy."
        raise CorruptFileError(str(path), "readable weights", str(error)[:300], next_step) from error


def _read_weight_file(path: Path) -> dict[str, Any]:
    if path.suffix == ".safetensors":
        require_regular_file(path)
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    return _load_mapped(path)


def _load_mapped(path: Path) -> Any:
    # torch.save records the device: a tensor saved on a GPU would go back there, or fail where there is none.
    return load_file(path, map_location="cpu", mmap=True)
