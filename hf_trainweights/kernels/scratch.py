"""Memory that one product after the other dequantizes into."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor


class Scratch(threading.local):
    """One buffer for each use and thread, kept from call to call.

    Fresh memory is paid for page by page: of a prefill of 256 tokens with int4 weights it took a quarter.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, use: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory, valid until the next `take` for the same use in this thread.

        Args:
            use: What for.
            shape: Shape to return.
            dtype: Dtype to return.

        Returns:
            A contiguous CPU tensor, a view of the buffer.
        """
        size_bytes = math.prod(shape) * dtype.itemsize
        buffer = self._buffers.get(use)
        if buffer is None or len(buffer) < size_bytes:
            # A tensor that is made in inference mode can never be written to outside it.
            with torch.inference_mode(False):
                buffer = self._buffers[use] = torch.empty(size_bytes, dtype=torch.uint8)
        return buffer[:size_bytes].view(dtype).view(shape)


SCRATCH = Scratch()
