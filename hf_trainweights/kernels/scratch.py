"""Memory that one product after the other dequantizes into."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

# Shapes that are kept at most for each use; the layers of a model ask for a handful.
_VIEWS = 64


class Scratch(threading.local):
    """One buffer for each use and thread, kept from call to call.

    Fresh memory is paid for page by page: of a prefill of 256 tokens with int4 weights it took a quarter.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[str, dict[tuple[tuple[int, ...], torch.dtype], Tensor]] = {}

    def take(self, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return uninitialised CPU memory, valid until the next `take` for the same use in this thread."""
        # One token after the other asks for the same shapes, and to make a view costs 2 us.
        views = self._views.setdefault(use, {})
        view = views.get((shape, dtype))
        if view is None:
            if len(views) == _VIEWS:
                views.clear()
            view = views[shape, dtype] = self._view(use, shape, dtype)
        return view

    def _view(self, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size_bytes = math.prod(shape) * dtype.itemsize
        buffer = self._buffers.get(use)
        # A tensor that is made in inference mode can never be written to outside it.
        with torch.inference_mode(False):
            if buffer is None or len(buffer) < size_bytes:
                self._views[use].clear()
                buffer = self._buffers[use] = torch.empty(size_bytes, dtype=torch.uint8)
            return buffer[:size_bytes].view(dtype).view(shape)


SCRATCH = Scratch()
