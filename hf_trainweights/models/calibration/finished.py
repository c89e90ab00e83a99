"""Blocks whose codes are chosen, kept on the disk, so that a call that was interrupted goes on where it stopped."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_trainweights.files.atomic import make_directories, move_file, save_errors
from hf_trainweights.files.safetensors_file import TensorToWrite, write_safetensors
from hf_trainweights.formats.base import Format

# Stands between the name of a weight and that of one of its tensors, and in no name of a parameter.
_SEPARATOR = "/"


class FinishedBlocks:
    """The stored tensors of blocks, in files named by all that they depend on; without a directory none are kept.

    `sha256` is that of the inputs with which the codes are chosen.
    """

    def __init__(self, directory: Path | None, sha256: str):
        self._directory, self._key = directory, sha256

    def read(self, weights: Sequence[tuple[str, Format | None, Tensor]]) -> dict[str, dict[str, Tensor]] | None:
        """Return the next block's tensors by weight, mapped from the disk; None: it is not finished."""
        if self._directory is None:
            return None
        sha256 = hashlib.sha256(self._key.encode())
        for name, form, weight in weights:
            sha256.update(f"{name} {form!r} {weight.dtype}".encode())
            sha256.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._key = sha256.hexdigest()
        return _read(self._directory / f"{self._key[:32]}.safetensors")

    def write(self, weights: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Keep the block that `read` has asked for; return its tensors as they are mapped, none if none are kept."""
        if self._directory is None:
            return {}
        file = self._directory / f"{self._key[:32]}.safetensors"
        flat = {_SEPARATOR.join((name, part)): each for name, parts in weights.items() for part, each in parts.items()}
        with save_errors(self._directory, "Nothing of this block was kept."):
            make_directories(self._directory)
            aside = file.with_suffix(".part")
            write_safetensors(aside, {name: TensorToWrite.of(tensor) for name, tensor in flat.items()}, {})
            move_file(aside, file)
        return _read(file) or {}


def remove_blocks(directory: Path) -> None:
    """Remove all blocks that were kept in a directory, and the directory unless something else lies there."""
    with contextlib.suppress(OSError):
        for file in directory.glob(f"{'[0-9a-f]' * 32}.*"):
            file.unlink()
        directory.rmdir()


def _read(file: Path) -> dict[str, dict[str, Tensor]] | None:
    """Return the tensors of a file by weight; None if it is not there or not whole."""
    found: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118  (it is no mapping)
                name, _, part = key.rpartition(_SEPARATOR)
                found.setdefault(name, {})[part] = opened.get_tensor(key)
    except (FileNotFoundError, SafetensorError):
        return None
    return found
