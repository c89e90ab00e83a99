"""Safetensors files: their header, and where their tensors lie."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

from hf_trainweights.errors import CorruptFileError

# The header of a safetensors file may not be larger; the format's own limit.
_MAX_HEADER_BYTES = 100_000_000

# Where int8 products read memory without copying it first, and what the format lets a header grow by.
_INT8_ALIGNMENT, _HEADER_ALIGNMENT = 16, 8
# Bytes that are moved at a time.
_MOVED_BYTES = 8 << 20

_AGAIN = "Download it again, or save it again from the source."


class StoredTensorPlace(NamedTuple):
    """Where a tensor lies in a safetensors file.

    Args:
        file: The file.
        name: Its name there.
        shape: Its shape.
        start: Its first byte, counted from the beginning of the file.
        end: The byte behind its last.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_safetensors_header(file: Path) -> dict[str, dict[str, Any]]:
    """Return name to dtype, shape and offsets of the tensors in a safetensors file, after checking its length.

    Args:
        file: Path of the file.

    Raises:
        CorruptFileError: The header does not parse, or the file is longer or shorter than it says.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
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
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptFileError(
                str(file), "a safetensors header", f"bytes that are none ({error})", _AGAIN
            ) from error
    if 8 + length + data_bytes != size:
        raise CorruptFileError(str(file), f"{8 + length + data_bytes} bytes, as its header says", f"{size}", _AGAIN)
    return header


def tensor_places(file: Path) -> list[StoredTensorPlace]:
    """Return where each tensor of a safetensors file lies.

    Args:
        file: Path of the file.

    Raises:
        CorruptFileError: It is no whole safetensors file.
    """
    header = read_safetensors_header(file)
    # The format allows no holes, so the tensors are the end of the file.
    data = file.stat().st_size - max((entry["data_offsets"][1] for entry in header.values()), default=0)
    return [
        StoredTensorPlace(file, name, tuple(entry["shape"]), data + start, data + end)
        for name, entry in header.items()
        for start, end in [entry["data_offsets"]]
    ]


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
