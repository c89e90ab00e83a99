"""The payload of an encoded file while it grows: in memory, or as the first record of the file itself.

A file begins with its payload, because the structure, which says how long it is, is known last.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2

from hf_trainweights.checkpoint.codecs.coding.blocks import ByteBuffer
from hf_trainweights.checkpoint.encoded.structure import ALIGNMENT_BYTES, padded_length
from hf_trainweights.files.torch_zip_writer import TorchZipWriter, Writable

_ZEROS = bytes(1 << 20)


class Payload:
    """Takes pieces, which come to lie at multiples of `ALIGNMENT_BYTES`; this one keeps them in memory."""

    def __init__(self, expected_bytes: int = 0) -> None:
        self._memory = ByteBuffer(expected_bytes)
        self.size_bytes = 0

    def append(self, piece: Tensor, crc32: int | None = None, *, continues: bool = False) -> None:
        """Append a 1-D uint8 CPU tensor, given its checksum if that is known; it may continue the piece before it."""
        if not continues:
            self._pad(-self.size_bytes % ALIGNMENT_BYTES)
        self._put(piece.numpy().data, crc32)

    def finish(self) -> Tensor:
        """Return all pieces and the padding after the last one, 1-D uint8."""
        self._pad(padded_length(self.size_bytes) - self.size_bytes)
        return torch.from_numpy(self._memory.view())

    def _pad(self, count: int) -> None:
        while count:
            count -= self._put(memoryview(_ZEROS)[:count], None)

    def _put(self, data: memoryview, crc32: int | None) -> int:
        self.size_bytes += len(data)
        self._write(data, crc32)
        return len(data)

    def _write(self, data: memoryview, crc32: int | None) -> None:
        self._memory.append(np.frombuffer(data, np.uint8))


class FilePayload(Payload):
    """A payload whose pieces go straight to a binary file at its beginning, which need not seek.

    The file consists of one `call`, with payload and structure. Equal contents give equal bytes.
    """

    def __init__(self, file: Writable, call: Callable[[Tensor, str], Any]):
        super().__init__()
        self._call = call
        self._archive = TorchZipWriter(file)
        self._archive.begin("data/0")

    def complete(self, structure: str) -> None:
        """Write the rest of the file: the padding, the structure, and what torch.load wants to know."""
        self.finish()
        self._archive.end()
        self._archive.add("data.pkl", _pickled(self._call, self.size_bytes, structure))
        self._archive.add("byteorder", b"little")
        self._archive.add("version", b"3\n")
        self._archive.finish()

    def _write(self, data: memoryview, crc32: int | None) -> None:
        self._archive.write(data, crc32)


class _Stored:
    """Stands for the payload or its storage in a pickle, where torch.save would have their bytes at hand."""

    def __init__(self, length: int):
        self.length = length

    def __reduce__(self) -> tuple[Any, ...]:
        # What a tensor of one dimension consists of, as torch pickles it; an empty one of numpy's has a stride of 0.
        stride = min(self.length, 1)
        return _rebuild_tensor_v2, (_Storage(self.length), 0, (self.length,), (stride,), False, OrderedDict())


class _Storage(_Stored):
    pass


class _Call:
    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self._reduced = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return ("storage", torch.ByteStorage, "0", "cpu", obj.length) if type(obj) is _Storage else None


def _pickled(call: Callable[[Tensor, str], Any], length: int, structure: str) -> bytes:
    """Return the pickle that torch.save writes of a call with 1-D uint8 of that length and a structure."""
    pickled = io.BytesIO()
    _Pickler(pickled, protocol=2).dump(_Call(call, _Stored(length), structure))
    return pickled.getvalue()
