"""Tensors in mapped files without names: the system writes their pages to the disk when memory gets scarce."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.files import disk
from hf_trainweights.files.atomic import save_errors
from hf_trainweights.files.disk import claim_file

# Smaller tensors stay in memory: a mapping takes whole pages, and a process may have 65,530 mappings.
_LEAST_BYTES = 1 << 16


class Spill:
    """Makes tensors whose memory is a file without a name; the system frees it with the tensor or the process.

    Args:
        directory: The directory of the files. If it does not exist yet, they lie in the nearest one above that does.
    """

    def __init__(self, directory: Path):
        self._directory = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir())

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a new tensor on the CPU: a large one is filled with zeros, a small one is not initialised."""
        size_bytes = math.prod(shape) * dtype.itemsize
        if size_bytes < _LEAST_BYTES:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        # Each tensor has its own storage, because Transformers copies tensors that share one before it saves them.
        plain = torch.empty(0, dtype=torch.uint8, device="cpu").set_(self._map(size_bytes))
        return plain.view(dtype).view(tuple(shape))

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a copy of a large CPU tensor in a file; return any other tensor itself."""
        if tensor.nbytes < _LEAST_BYTES or tensor.device.type != "cpu":
            return tensor
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor)

    def _map(self, size_bytes: int) -> Any:
        with save_errors(self._directory, "Nothing was left there."):
            # The claim is the file under a temporary name, locked, so that no cleaner removes it while it has the name.
            claim, descriptor = claim_file(self._directory)
            try:
                _reserve(descriptor, size_bytes)
                # `from_file` keeps no descriptor open: a model has more weights than a process may open files.
                return torch.UntypedStorage.from_file(str(claim.path), shared=True, nbytes=size_bytes)
            finally:
                os.close(descriptor)
                disk.file_system.unlink(claim.path)
                claim.release()


def _reserve(descriptor: int, size_bytes: int) -> None:
    """Reserve the disk space, because writing to a mapped page that does not fit the disk would end the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size_bytes)
        return
    zeros = memoryview(bytes(min(size_bytes, 1 << 20)))
    while size_bytes > 0:
        size_bytes -= os.write(descriptor, zeros[:size_bytes])
