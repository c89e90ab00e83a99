"""`GgufFile`: the metadata and the tensors of a GGUF file, or of a model split into several, without copying weights.

| part of a file | content |
|---|---|
| header | `GGUF`, uint32 version, uint64 number of tensors, uint64 number of metadata entries |
| metadata | for each entry a string as key, the number of a type, and the value |
| tensor table | for each tensor its name, the number of its dimensions, its sizes (columns first), kind and offset |
| tensors | each at a multiple of `general.alignment` from the end of the table |

A string is its length as uint64 and UTF-8 bytes; an array is the number of its type, its length as uint64, and values.
A file says how long its parts are, so each length is compared with the bytes that are left before anything is made.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.errors import ConfigError, CorruptFileError, UnsupportedError
from hf_trainweights.files.reading import require_regular_file
from hf_trainweights.imports.layouts.base import AGAIN

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
# Metadata types that have one size, as numpy names them.
_NUMBERS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    _FLOAT32: "<f4",
    _BOOL: "u1",
    10: "<u8",
    11: "<i8",
}
_NUMBERS |= {12: "<f8"}
# The fewest bytes of a metadata entry (an empty key, a type, one byte) and of an entry of the tensor table.
_LEAST_ENTRY_BYTES, _LEAST_TENSOR_BYTES = 13, 24
_MAX_DIMENSIONS, _MAX_NESTED = 4, 4
_ALIGNMENT, _DEFAULT_ALIGNMENT = "general.alignment", 32
_SHOWN_CHARACTERS = 100

SPLIT_FILE = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


class Kind(NamedTuple):
    """A kind of tensor: its name, and the values and bytes of a block of it."""

    name: str
    block_size: int
    block_bytes: int


KINDS = {
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    2: Kind("Q4_0", 32, 18),
    3: Kind("Q4_1", 32, 20),
    6: Kind("Q5_0", 32, 22),
    7: Kind("Q5_1", 32, 24),
    8: Kind("Q8_0", 32, 34),
    9: Kind("Q8_1", 32, 40),
    10: Kind("Q2_K", 256, 84),
    11: Kind("Q3_K", 256, 110),
    12: Kind("Q4_K", 256, 144),
    13: Kind("Q5_K", 256, 176),
    14: Kind("Q6_K", 256, 210),
    15: Kind("Q8_K", 256, 292),
    16: Kind("IQ2_XXS", 256, 66),
    17: Kind("IQ2_XS", 256, 74),
    18: Kind("IQ3_XXS", 256, 98),
    19: Kind("IQ1_S", 256, 50),
    20: Kind("IQ4_NL", 32, 18),
    21: Kind("IQ3_S", 256, 110),
    22: Kind("IQ2_S", 256, 82),
    23: Kind("IQ4_XS", 256, 136),
    24: Kind("I8", 1, 1),
    25: Kind("I16", 1, 2),
    26: Kind("I32", 1, 4),
    27: Kind("I64", 1, 8),
    28: Kind("F64", 1, 8),
    29: Kind("IQ1_M", 256, 56),
    30: Kind("BF16", 1, 2),
    34: Kind("TQ1_0", 256, 54),
    35: Kind("TQ2_0", 256, 66),
    39: Kind("MXFP4", 32, 17),
    40: Kind("NVFP4", 64, 36),
    41: Kind("Q1_0", 128, 18),
}
"""The kinds of tensors by their numbers in a file."""


class GgufTensor(NamedTuple):
    """A tensor of a file.

    Args:
        kind: Its kind.
        shape: Its shape in values, the columns last.
        data: Its bytes, a view of the mapped file, uint8 `[rows, bytes of a row]`.
    """

    kind: Kind
    shape: tuple[int, ...]
    data: Tensor


class GgufFile:
    """The metadata and tensors of a model in one GGUF file, or in all files of a split model.

    In the metadata, arrays of numbers are numpy arrays. An array of strings or of arrays is stored as its length alone,
    because nobody here reads more.

    Args:
        path: The file, or any file of a split model.

    Raises:
        ConfigError: The file cannot be read.
        CorruptFileError: A file is damaged, or a file of a split model is missing.
        UnsupportedError: It is big-endian, or of a version or with a kind of tensor that this package does not know.
    """

    def __init__(self, path: Path):
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self.size_bytes = 0
        for number, file in enumerate(_files(path)):
            metadata, tensors = _read(file)
            if twice := tensors.keys() & self.tensors.keys():
                raise CorruptFileError(str(file), f"{min(twice)} in one file", "it in several", AGAIN)
            self.tensors |= tensors
            self.size_bytes += file.stat().st_size
            if number == 0:
                # The other files of a split model repeat a part of the first one's metadata at most.
                self.path, self.metadata = file, metadata
        self._check_split_count()

    def text(self, key: str) -> str | None:
        """Return a string of the metadata, or None if there is none of this key."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def _check_split_count(self) -> None:
        count = self.metadata.get("split.tensors.count")
        if isinstance(count, int) and count != len(self.tensors):
            raise CorruptFileError(str(self.path), f"{count} tensors in all files", f"{len(self.tensors)}", AGAIN)


def _files(path: Path) -> list[Path]:
    """Return all files of the model that a file belongs to; CorruptFileError: one is missing."""
    match = SPLIT_FILE.fullmatch(path.name)
    if match is None:
        return [path]
    # A count may be any number of five digits. So the first file that is missing ends the search.
    files = []
    for number in range(1, int(match["count"]) + 1):
        file = path.with_name(f"{match['stem']}-{number:05}-of-{match['count']}.gguf")
        if not file.is_file():
            next_step = "Download the other files of the model into the same directory."
            raise CorruptFileError(str(file), "a file of a split model", "no such file", next_step)
        files.append(file)
    return files or [path]


def _read(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    try:
        require_regular_file(path)
        size_bytes = path.stat().st_size
        # A private mapping asks for no right to write, and an empty file cannot be mapped.
        mapped = torch.from_file(str(path), shared=False, size=size_bytes, dtype=torch.uint8) if size_bytes else None
    except (OSError, RuntimeError) as error:
        next_step = "Check its permissions and the disk that it lies on."
        raise ConfigError(str(path), "a file that can be read", str(error).partition("\n")[0], next_step) from error
    data = torch.empty(0, dtype=torch.uint8) if mapped is None else mapped
    return _Parser(str(path), data).parse()


class _Parser:
    """Reads one file from its beginning; `_at` is the next byte to read."""

    def __init__(self, where: str, data: Tensor):
        self._where, self._data, self._at = where, data, 0
        self._bytes = memoryview(cast(Any, data.numpy())).toreadonly()

    def parse(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        """Return metadata and tensors."""
        tensor_count, entry_count = self._header()
        self._check_count(entry_count, _LEAST_ENTRY_BYTES, "metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = self._string("a key of the metadata")
            if key in metadata:
                raise self._corrupt(f"one value for {key}", "two")
            metadata[key] = self._value(self._unpack("<I")[0], key)
        return metadata, self._tensors(tensor_count, self._alignment(metadata))

    def _header(self) -> tuple[int, int]:
        """Return the numbers of tensors and of metadata entries."""
        magic = bytes(self._take(4, "a header"))
        if magic != _MAGIC:
            raise self._corrupt("GGUF in the first four bytes", repr(magic))
        (version,) = self._unpack("<I")
        if version in _VERSIONS:
            tensors, entries = self._unpack("<QQ")
            return tensors, entries
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped <= max(_VERSIONS):
            next_step = "Convert it with gguf_convert_endian.py of llama.cpp, or take a file for usual processors."
            raise UnsupportedError(self._where, "a little-endian file", "a big-endian one", next_step)
        next_step = "Convert the model again with a current llama.cpp."
        raise UnsupportedError(
            self._where, f"version {' or '.join(map(str, _VERSIONS))}", f"version {version}", next_step
        )

    def _tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        self._check_count(count, _LEAST_TENSOR_BYTES, "tensors")
        entries = [self._entry() for _ in range(count)]
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        end, last = 0, "the table"
        for name, kind, shape, offset in sorted(entries, key=lambda entry: entry[3]):
            rows, row_bytes = math.prod(shape[:-1]), shape[-1] // kind.block_size * kind.block_bytes
            if name in tensors:
                raise self._corrupt(f"{name} once", "it twice")
            if offset % alignment:
                raise self._corrupt(f"{name} at a multiple of {alignment} bytes", f"{offset}")
            if offset < end:
                raise self._corrupt(f"{name} behind {last}", "both in the same bytes")
            end, last = offset + rows * row_bytes, name
            if start + end > len(self._data):
                left = f"bytes {offset} to {end} of {max(0, len(self._data) - start)}"
                raise self._corrupt(f"all bytes of {name}", left)
            data = self._data[start + offset : start + end]
            tensors[name] = GgufTensor(kind, shape, data.view(rows, row_bytes))
        return tensors

    def _entry(self) -> tuple[str, Kind, tuple[int, ...], int]:
        """Return name, kind, shape and offset of the next tensor of the table."""
        name = self._string("the name of a tensor")
        (dimensions,) = self._unpack("<I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._corrupt(f"1 to {_MAX_DIMENSIONS} dimensions of {name}", f"{dimensions}")
        shape = self._unpack(f"<{dimensions}Q")[::-1]
        number, offset = self._unpack("<IQ")
        if number not in KINDS:
            next_step = "Convert the model to a kind such as Q4_K_M with a released llama.cpp."
            raise UnsupportedError(
                f"{self._where}: {name}", "a kind of tensor that this package knows", f"kind {number}", next_step
            )
        kind = KINDS[number]
        # A size of zero would let a table of few bytes describe any number of rows.
        if not all(shape) or shape[-1] % kind.block_size:
            raise self._corrupt(f"rows of {name} in blocks of {kind.block_size} for {kind.name}", f"the shape {shape}")
        return name, kind, shape, offset

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._corrupt(f"a power of two as {_ALIGNMENT}", repr(alignment)[:_SHOWN_CHARACTERS])
        return alignment

    def _value(self, kind: int, key: str, nested: int = 0) -> Any:
        if kind == _STRING:
            return self._string(key, errors="replace")
        if kind == _ARRAY:
            return self._array(key, nested)
        if kind not in _NUMBERS:
            raise self._corrupt(f"a type of metadata for {key}", f"type {kind}")
        number = np.frombuffer(self._take(np.dtype(_NUMBERS[kind]).itemsize, key), _NUMBERS[kind])[0]
        if kind == _FLOAT32:
            return float(str(number))  # 1e-6 again, and not the float64 next to it
        return bool(number) if kind == _BOOL else number.item()

    def _array(self, key: str, nested: int) -> Any:
        """Return an array of numbers, or the length of an array of strings or arrays, whose elements are checked."""
        kind, count = self._unpack("<IQ")
        if kind in _NUMBERS:
            dtype = np.dtype(_NUMBERS[kind])
            self._check_count(count, dtype.itemsize, f"elements of {key}")
            numbers = np.frombuffer(self._take(count * dtype.itemsize, key), dtype)
            return numbers != 0 if kind == _BOOL else numbers
        if kind == _STRING:
            self._check_count(count, 8, f"elements of {key}")
            for _ in range(count):
                self._take(self._unpack("<Q")[0], key)
            return count
        if kind != _ARRAY or nested >= _MAX_NESTED:
            raise self._corrupt(
                f"an array of values as {key}", f"arrays in {nested} others" if kind == _ARRAY else f"type {kind}"
            )
        self._check_count(count, 12, f"elements of {key}")
        for _ in range(count):
            self._array(key, nested + 1)
        return count

    def _string(self, role: str, errors: str = "strict") -> str:
        (length,) = self._unpack("<Q")
        data = bytes(self._take(length, role))
        try:
            return data.decode(errors=errors)
        except UnicodeDecodeError as error:
            raise self._corrupt(f"UTF-8 as {role}", repr(data)[:_SHOWN_CHARACTERS]) from error

    def _unpack(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout), "a header"))

    def _take(self, count: int, role: str) -> memoryview:
        """Return the next bytes; CorruptFileError: the file has fewer."""
        self._check_count(count, 1, f"bytes of {role}")
        self._at += count
        return self._bytes[self._at - count : self._at]

    def _check_count(self, count: int, least_bytes: int, role: str) -> None:
        left = len(self._bytes) - self._at
        if count * least_bytes > left:
            raise self._corrupt(f"{count} {role}"[:_SHOWN_CHARACTERS], f"{left} bytes left in the file")

    def _corrupt(self, expected: str, found: str) -> CorruptFileError:
        return CorruptFileError(self._where, expected, found, AGAIN)
