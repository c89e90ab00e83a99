"""Safetensors files: their header, and files that are written once, tensor by tensor, with int8 codes aligned."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from hf_trainweights.errors import CorruptFileError, SaveError
from hf_trainweights.files.reading import DigestedFile, open_regular_file

# The header of a safetensors file may not be larger; the format's own limit.
_MAX_HEADER_BYTES = 100_000_000

# Where int8 products read memory without copying it first, and what the format lets a header grow by.
_INT8_ALIGNMENT, _HEADER_ALIGNMENT = 16, 8
# Bytes that are digested and written at a time.
_PIECE_BYTES = 1 << 18

_AGAIN = "Download it again, or save it again from the source."


def read_safetensors_header(file: Path) -> dict[str, dict[str, Any]]:
    """Return name to dtype, shape and offsets of the tensors in a safetensors file, after checking its length."""
    with open_regular_file(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise CorruptFileError(
                str(file),
                "a safetensors header of 2 bytes or more inside the file",
                f"{length} of {size} bytes",
                _AGAIN,
            )
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            # The format allows no holes, so the sizes add up to the length of the file.
            data_bytes = sum(end - start for entry in header.values() for start, end in [entry["data_offsets"]])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CorruptFileError(
                str(file), "a safetensors header", f"bytes that are none ({error})", _AGAIN
            ) from error
    if 8 + length + data_bytes != size:
        raise CorruptFileError(str(file), f"{8 + length + data_bytes} bytes, as its header says", f"{size}", _AGAIN)
    return header


class TensorToWrite(NamedTuple):
    """A tensor that is made when its turn to be written comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorToWrite:
        """Return a tensor that is there already."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in a file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    file: Path,
    tensors: Mapping[str, TensorToWrite],
    metadata: Mapping[str, str],
    name_in_file: Callable[[str], str] = str,
) -> str:
    """Write the file that `safetensors.torch.save_file` writes, holding one tensor at a time, and return its SHA-256.

    Where 8 spaces more in the header let more of the int8 tensors begin where a product can read the mapped file, the
    header has them. The content is the same, and equal tensors give equal files. A name from `name_in_file` must not be
    longer than the old one, whose place in the order it keeps.
    """
    # Of tensors without elements safetensors makes a header that has the same names, in the order of the file.
    empty = {name: torch.empty(0, dtype=each.dtype, device="cpu") for name, each in tensors.items()}
    header: dict[str, Any] = json.loads(save(empty, dict(metadata))[8:])
    names, end = [name for name in header if name in tensors], 0
    # safetensors writes it in random order.
    header |= {"__metadata__": dict(sorted(header["__metadata__"].items()))} if metadata else {}
    for name in names:
        start, end = end, end + tensors[name].nbytes
        header[name] |= {"shape": list(tensors[name].shape), "data_offsets": [start, end]}
    length = _aligned_length(len(_json(header)), [header[name] for name in names if header[name]["dtype"] == "I8"])
    renamed = {name_in_file(name) if name in tensors else name: entry for name, entry in header.items()}
    text = _json(renamed)
    assert len(renamed) == len(header), f"{file}: two tensors have the same new name"
    assert len(text) <= length, f"{file}: a new name is longer than the old one"
    with file.open("wb") as stream:
        digested = DigestedFile(stream)
        digested.write(struct.pack("<Q", length) + text.ljust(length))
        for name in names:
            _write_pieces(_bytes_of(name, tensors[name]), digested)
    return digested.sha256()


def _json(header: Mapping[str, Any]) -> bytes:
    return json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()


def _aligned_length(length: int, int8: Sequence[Mapping[str, Any]]) -> int:
    """Return the length of a header with the padding that aligns most of the int8 tensors behind it."""
    length += -length % _HEADER_ALIGNMENT
    starts = [entry["data_offsets"][0] for entry in int8]
    aligned, moved = (
        sum((8 + length + padding + start) % _INT8_ALIGNMENT == 0 for start in starts)
        for padding in (0, _HEADER_ALIGNMENT)
    )
    return length + _HEADER_ALIGNMENT * (moved > aligned)


def _write_pieces(data: memoryview, file: DigestedFile) -> None:
    # What the digest has read is still in the cache when it is written.
    for start in range(0, len(data), _PIECE_BYTES):
        file.write(data[start : start + _PIECE_BYTES])


def _bytes_of(name: str, tensor: TensorToWrite) -> memoryview:
    made = tensor.make()
    if (tuple(made.shape), made.dtype) != (tuple(tensor.shape), tensor.dtype):
        expected = f"{tensor.dtype} of shape {tuple(tensor.shape)}, as was said"
        found = f"{made.dtype} of shape {tuple(made.shape)}"
        raise SaveError(name, expected, found, "Say shape and dtype of the tensor that is made.")
    return made.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
