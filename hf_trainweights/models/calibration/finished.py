"""Blocks whose codes are chosen, kept on the disk, so that a call after an interruption goes on from there."""

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

# Stands between the name of a weight and the name of one of its stored tensors. No name of a parameter has it.
_SEPARATOR = "/"


class FinishedBlocks:
    """The stored tensors of finished blocks, a file for each; if the directory is None, no block is kept.

    A block depends on all blocks before it. So a chain of digests names the files: each digest is that of the one
    before and of the block's float weights. The chain begins with `sha256`, the digest of the inputs that choose the
    codes. Call `read` once for each block, in their order.
    """

    def __init__(self, directory: Path | None, sha256: str):
        self._directory, self._key = directory, sha256

    def read(self, weights: Sequence[tuple[str, Format | None, Tensor]]) -> dict[str, dict[str, Tensor]] | None:
        """Return the memory-mapped tensors of the next block by weight, None if the block is not finished."""
        if self._directory is None:
            return None
        sha256 = hashlib.sha256(self._key.encode())
        for name, form, weight in weights:
            sha256.update(f"{name} {form!r} {weight.dtype}".encode())
            sha256.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._key = sha256.hexdigest()
        return _read(self._directory / f"{self._key[:32]}.safetensors")

    def write(self, weights: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Keep the block that the last `read` was for; return its memory-mapped tensors, or {} if no block is kept."""
        if self._directory is None:
            return {}
        file = self._directory / f"{self._key[:32]}.safetensors"
        flat = {_SEPARATOR.join((name, k)): v for name, stored in weights.items() for k, v in stored.items()}
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
    """Return the memory-mapped tensors of a file by weight; None if it is missing or incomplete."""
    weights: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for entry in opened.keys():  # noqa: SIM118  (it is no mapping)
                name, _, key = entry.rpartition(_SEPARATOR)
                weights.setdefault(name, {})[key] = opened.get_tensor(entry)
    except (FileNotFoundError, SafetensorError):
        return None
    return weights
