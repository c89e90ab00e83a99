"""Safetensors files: their header, files that are written tensor by tensor, and the alignment of int8 codes."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from hf_trainweights.errors import CorruptFileError, SaveError
from hf_trainweights.files.regular_files import open_regular_file

# The header of a safetensors file may not be larger; the format's own limit.
_MAX_HEADER_BYTES = 100_000_000

# Where int8 products read memory without copying it first, and what the format lets a header grow by.
_INT8_ALIGNMENT, _HEADER_ALIGNMENT = 16, 8
# Bytes that are moved at a time.
_MOVED_BYTES = 8 << 20

_AGAIN = "Download it again, or save it again from the source."


def read_safetensors_header(file: Path) -> dict[str, dict[str, Any]]:
    """Return name to dtype, shape and offsets of the tensors in a safetensors file, after checking its length.

    Args:
        file: Path of the file.

    Raises:
        CorruptFileError: The header does not parse, or the file is longer or shorter than it says, or no regular file.
        OSError: It is missing, or cannot be read.
    """
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
    """A tensor that is made when its turn to be written comes.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        make: Makes it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in a file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(file: Path, tensors: Mapping[str, TensorToWrite], metadata: dict[str, str]) -> None:
    """Write the file that `safetensors.torch.save_file` writes of these tensors, with one of them in memory at a time.

    Args:
        file: Path of the file; replaced.
        tensors: By name.
        metadata: What the header says of them.

    Raises:
        SaveError: A tensor that was made has another shape or dtype than was said.
        OSError: The file cannot be written.
    """
    # Of tensors without elements safetensors makes a header that has the same names, in the order of the file.
    template = save({name: torch.empty(0, dtype=each.dtype, device="cpu") for name, each in tensors.items()}, metadata)
    header: dict[str, Any] = json.loads(template[8:])
    names, end = [name for name in header if name in tensors], 0
    # safetensors writes it in random order.
    header |= {"__metadata__": dict(sorted(header["__metadata__"].items()))} if metadata else {}
    for name in names:
        start, end = end, end + tensors[name].nbytes
        header[name] |= {"shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            stream.write(_bytes_of(name, tensors[name]))


def _bytes_of(name: str, tensor: TensorToWrite) -> memoryview:
    made = tensor.make()
    if (tuple(made.shape), made.dtype) != (tuple(tensor.shape), tensor.dtype):
        expected = f"{tensor.dtype} of shape {tuple(tensor.shape)}, as was said"
        found = f"{made.dtype} of shape {tuple(made.shape)}"
        raise SaveError(name, expected, found, "Say shape and dtype of the tensor that is made.")
    return made.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def rename_tensors(file: Path, new_name: Callable[[str], str]) -> None:
    """Rename tensors in the header of a safetensors file; their bytes stay where they are.

    Args:
        file: A whole file, which nothing has mapped yet; its header is rewritten in place, with spaces at its end.
        new_name: Returns the new name of a tensor, which must not be longer than the old one.

    Raises:
        CorruptFileError: It is no safetensors file.
        OSError: It cannot be written; it is damaged then.
    """
    read_safetensors_header(file)
    with file.open("r+b") as stream:
        length = struct.unpack("<Q", stream.read(8))[0]
        header: dict[str, Any] = json.loads(stream.read(length))
        renamed = {name if name == "__metadata__" else new_name(name): entry for name, entry in header.items()}
        if renamed.keys() != header.keys():
            text = json.dumps(renamed, ensure_ascii=False, separators=(",", ":")).encode()
            assert len(text) <= length, f"{file}: a new name is longer than the old one"
            assert len(renamed) == len(header), f"{file}: two tensors have the same new name"
            stream.seek(8)
            stream.write(text.ljust(length))


def align_int8(file: Path) -> None:
    """Let the int8 tensors of a safetensors file begin where the memory-mapped file can be multiplied with as it is.

    They lie one behind the other, so 8 spaces more in the header align all of them, or the most where their sizes are
    odd. The content stays the same, and equal files stay equal.

    Args:
        file: A whole file, which nothing has mapped yet; rewritten in place where that helps.

    Raises:
        CorruptFileError: It is no safetensors file.
        OSError: It cannot be written; it is damaged then.
    """
    header = read_safetensors_header(file)
    starts = [entry["data_offsets"][0] for entry in header.values() if entry["dtype"] == "I8"]
    with file.open("r+b") as stream:
        length = struct.unpack("<Q", stream.read(8))[0]
        aligned, moved = (
            sum((8 + length + padding + start) % _INT8_ALIGNMENT == 0 for start in starts)
            for padding in (0, _HEADER_ALIGNMENT)
        )
        if moved <= aligned:
            return
        end = file.stat().st_size
        while end > 8 + length:
            start = max(8 + length, end - _MOVED_BYTES)
            stream.seek(start)
            block = stream.read(end - start)
            stream.seek(start + _HEADER_ALIGNMENT)
            stream.write(block)
            end = start
        stream.seek(8 + length)
        stream.write(b" " * _HEADER_ALIGNMENT)
        stream.seek(0)
        stream.write(struct.pack("<Q", length + _HEADER_ALIGNMENT))
