"""Where encoded bytes wait until the file is written: in memory, and beyond a limit in a file without a name."""

from __future__ import annotations

import mmap
import tempfile
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.coding.memory import ByteBuffer
from hf_trainweights.checkpoint.encoded.structure import ALIGNMENT_BYTES, padded_length

# Payloads up to this size wait in memory, larger ones in a temporary file.
_MEMORY_BYTES = 96 << 20
_ZEROS_BYTES = 1 << 20


class Spool:
    """Collects pieces at multiples of `ALIGNMENT_BYTES`: in memory, or in an unlinked file once they get too large.

    Args:
        directory: Where the file lies. Default: the system's choice.
        expected_bytes: About how much there will be.
    """

    def __init__(self, directory: Path | None, expected_bytes: int):
        self._directory = directory
        self._memory = ByteBuffer(min(expected_bytes, _MEMORY_BYTES))
        self._file: BinaryIO | None = None
        self._bytes = 0

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()

    def append(self, payload: Tensor) -> None:
        """Append a 1-D uint8 CPU tensor."""
        self._add(np.zeros(-self._bytes % ALIGNMENT_BYTES, np.uint8))
        self._add(payload.numpy())

    def finish(self) -> Tensor:
        """Return all pieces and the padding after the last one, 1-D uint8, in memory or mapped from the file."""
        padding = padded_length(self._bytes) - self._bytes
        for start in range(0, padding, _ZEROS_BYTES):
            self._add(np.zeros(min(padding - start, _ZEROS_BYTES), np.uint8))
        if self._file is None:
            return torch.from_numpy(self._memory.view())
        self._file.flush()
        mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)  # lives on when the file is closed
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def _add(self, piece: np.ndarray) -> None:
        self._bytes += len(piece)
        if self._file is None and self._bytes > _MEMORY_BYTES:
            self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115
            self._file.write(self._memory.view().data)
            self._memory = ByteBuffer()
        if self._file is None:
            self._memory.append(piece)
        else:
            self._file.write(piece.data)
