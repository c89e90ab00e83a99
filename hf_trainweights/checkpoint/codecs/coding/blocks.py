"""Cuts tensors into chunks or tiles, reuses memory to work on them, and codes bytes in blocks by zstd's Huffman coder.

A *block* is a sequence of bytes that are coded together. The reader knows the length of each block beforehand, from the
tensor's shape and the blocks that it has read already, so no zstd frame can make it allocate more. A payload is

| part | content |
|---|---|
| blocks | back to back; each either as it is or, when that is smaller, as one standard zstd frame |
| table | one uint32 per block, little-endian: its stored size; equal to the block's own size means stored as it is |

`hf_trainweights.files.byte_planes` codes each block.

A `ChunkedCodec` encodes a tensor chunk by chunk, so that a large tensor takes little memory and several threads can
work on it. Its first payload has the blocks of the chunks one after the other. If chunks have flags, a last block
holds them, one byte per chunk.

A *tile* is a rectangle of the matrix that a tensor is viewed as. The first write to a fresh page takes longer than most
of the arithmetic on it, so each tile reuses the memory of the tile before, and large memory is asked for in huge pages.
"""

from __future__ import annotations

import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import Codec, EncodedTensor, References
from hf_trainweights.files.byte_planes import decode_block, encode_block

Tile = tuple[slice, slice]
"""Rows and columns of a matrix that are contiguous in memory."""

Rows = slice | np.ndarray
"""Neighbouring rows of a matrix, with all or some columns; or the numbers of rows with all columns, int64 [r]."""

Placed = tuple[np.ndarray, np.ndarray | None]
"""Rows of float32: either an array [r, c] and None, or a matrix [R, c] and the numbers of rows in it, int64 [r]."""

TILE = 1 << 18
"""Most elements of a tile for arithmetic. Files do not depend on it."""


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Return the shape [R, C] of the matrix that a tensor is viewed as; [0, 1] for an empty one."""
    count = shape.numel()
    if count == 0:
        return 0, 1
    splits = [shape[:dims].numel() for dims in range(1, len(shape))] or [1]
    return min(((rows, count // rows) for rows in splits), key=max)


def tiles(R: int, C: int, size: int = TILE) -> Iterator[Tile]:
    """Cut a matrix [R, C] into tiles of at most `size` elements, and yield them in row-major order."""
    height = max(size // C, 1)
    for row in range(0, R, height):
        for column in range(0, C, size):
            yield slice(row, min(row + height, R)), slice(column, min(column + size, C))


def tile_count(R: int, C: int, size: int) -> int:
    """Return the number of tiles that `tiles` yields for a matrix [R, C]."""
    return -(-R // max(size // C, 1)) * -(-C // size)


def rows_of(matrix: Tensor, rows: Rows, columns: slice, use: str) -> Placed:
    """Return elements of a matrix as float32: a view, or a copy in scratch if they have another dtype."""
    if isinstance(rows, slice):
        return to_float32(matrix[rows, columns], use), None
    if matrix.dtype == torch.float32:
        return matrix.numpy(), rows
    return to_float32(matrix[torch.from_numpy(rows)], use), None


def to_float32(elements: Tensor, use: str) -> np.ndarray:
    """Return the elements of a tile as float32 [r, c]: a view, or a copy in scratch if they have another dtype."""
    if elements.dtype == torch.float32:
        return elements.numpy()
    values = scratch(use, elements.shape)
    torch.from_numpy(values).copy_(elements)
    return values


def rounded_to(dtype: torch.dtype, values: np.ndarray) -> np.ndarray:
    """Round float32 values to numbers of `dtype`, and return these as float32."""
    return torch.from_numpy(values).to(dtype).to(torch.float32).numpy()


def dense(placed: Placed) -> np.ndarray:
    """Return rows as one float32 array [r, c]."""
    values, rows = placed
    return values if rows is None else values[rows]


def fill(placed: Placed, values: np.ndarray) -> None:
    """Write values, float32 [r, c], to the rows that `placed` names."""
    matrix, rows = placed
    matrix[slice(None) if rows is None else rows] = values


# Linux takes pages of this size for large memory, but only for whole ones, each at a multiple of its size.
_HUGE_PAGE_BYTES = 2 << 20
# The last huge page of a tensor may hold so much that is not in use, as a share of the tensor.
_MOST_UNUSED = 1 / 8


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised contiguous CPU tensor to decode into.

    numpy allocates it, because numpy asks Linux for huge pages. With small pages, the first touch of a large tensor can
    take as long as decoding it. A large tensor begins with a huge page, so that its first and its last megabyte lie in
    huge pages too.
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    is_large = size_bytes >= 2 * _HUGE_PAGE_BYTES and -size_bytes % _HUGE_PAGE_BYTES <= size_bytes * _MOST_UNUSED
    buffer = np.empty(size_bytes + is_large * _HUGE_PAGE_BYTES, np.uint8)
    if not len(buffer):
        return torch.empty(shape, dtype=dtype)
    start = -buffer.__array_interface__["data"][0] % _HUGE_PAGE_BYTES if is_large else 0
    return torch.from_numpy(buffer[start : start + size_bytes]).view(dtype).view(shape)


_scratch = threading.local()


def scratch(use: str, shape: Sequence[int], dtype: DTypeLike = np.float32) -> np.ndarray:
    """Return uninitialised, contiguous memory, valid until the next call for the same use in this thread.

    Each use, a name, has a buffer of its own, which grows to the largest shape and stays allocated.
    """
    size_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    buffers: dict[str, np.ndarray] = vars(_scratch)
    if use not in buffers or len(buffers[use]) < size_bytes:
        buffers[use] = np.empty(size_bytes, np.uint8)
    return buffers[use][:size_bytes].view(dtype).reshape(shape)


CHUNK = 1 << 18
"""Elements coded together: large enough for good statistics, small enough for the processor's cache."""


def chunk_ranges(count: int, size: int = CHUNK) -> Iterator[slice]:
    """Yield the slices of `size` elements, the last one shorter, that make up `count` elements."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


class ByteBuffer:
    """Bytes that grow by appending. Memory for the expected bytes is reserved at once, but not touched before use."""

    def __init__(self, expected_bytes: int = 0):
        self._memory = np.empty(expected_bytes, np.uint8)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, data: np.ndarray) -> None:
        """Append a copy of a 1-D uint8 array."""
        start, self._length = self._length, self._length + len(data)
        if self._length > len(self._memory):
            grown = np.empty(max(2 * start, self._length), np.uint8)
            grown[:start] = self._memory[:start]
            self._memory = grown
        self._memory[start : self._length] = data

    def finish(self) -> np.ndarray:
        """Return all appended bytes, uint8, and free the rest of the memory. It is the last call."""
        if self._length < len(self._memory):
            self._memory.resize(self._length, refcheck=False)
        return self._memory[:]


class BlockWriter:
    """Collects blocks into one payload of about `expected_bytes`."""

    def __init__(self, expected_bytes: int = 0) -> None:
        self._data = ByteBuffer(expected_bytes)
        self._sizes: list[int] = []

    @property
    def size_bytes(self) -> int:
        """Stored size of all blocks."""
        return len(self._data)

    def write(self, block: np.ndarray) -> None:
        """Append a block, a 1-D contiguous uint8 array."""
        stored = encode_block(block)
        self._data.append(stored)
        self._sizes.append(len(stored))

    def blocks(self) -> tuple[Tensor, list[int]]:
        """Return all blocks, 1-D uint8, and their stored sizes."""
        return torch.from_numpy(self._data.finish()), self._sizes

    def payload(self, earlier_sizes: Sequence[int] = ()) -> Tensor:
        """Return all blocks and the table of sizes, 1-D uint8. Sizes of blocks that were written earlier come first."""
        self._data.append(np.array([*earlier_sizes, *self._sizes], "<u4").view(np.uint8))
        return self.blocks()[0]


class BlockReader:
    """Reads the blocks of one payload, 1-D uint8, in any order; CorruptFileError: it does not hold `count` blocks."""

    def __init__(self, codec: type[Codec], payload: Tensor, count: int):
        table_bytes = 4 * count
        if payload.numel() < table_bytes:
            raise codec.corrupt("payload", f">= {table_bytes} bytes of table", f"{payload.numel()} bytes")
        self._codec = codec
        data_bytes = payload.numel() - table_bytes
        self._data = payload[:data_bytes].numpy()
        self._data.flags.writeable = False
        sizes = np.frombuffer(payload[data_bytes:].numpy().tobytes(), "<u4").tolist()
        self._edges = list(accumulate(sizes, initial=0))
        if self._edges[-1] != data_bytes:
            raise codec.corrupt("payload", f"{self._edges[-1]} bytes of blocks", f"{data_bytes} bytes")

    def read(self, index: int, size: int) -> np.ndarray:
        """Return block `index`, uint8 [size], read-only; CorruptFileError: it is damaged, or of another size."""
        start = self._edges[index]
        stored = self._data[start : self._edges[index + 1]]
        where = f"block {index} at byte {start}"
        return decode_block(stored, size, lambda expected, found: self._codec.corrupt(where, expected, found))


def int16_to_bytes(numbers: np.ndarray) -> np.ndarray:
    """Return the low bytes of all int16 numbers, then their high bytes, uint8."""
    return np.concatenate([numbers.astype(np.uint8), (numbers >> 8).astype(np.uint8)])


def bytes_to_int16(planes: np.ndarray) -> np.ndarray:
    """Undo `int16_to_bytes`."""
    low, high = planes.reshape(2, -1)
    return high.astype(np.int16) * np.int16(256) + low


@dataclass(frozen=True)
class Chunks:
    """A tensor of `size_bytes`, cut into chunks that are about to be encoded.

    `ranges` says where each chunk lies: a slice of the flat tensor or a tile. `write` encodes the chunk of a range,
    writes its blocks and returns its flag, which is stored if `has_flags`. `others` are the payloads after the first.
    """

    size_bytes: int
    ranges: Sequence[Any]
    write: Callable[[BlockWriter, Any], int]
    has_flags: bool = False
    others: tuple[Tensor, ...] = ()

    def encode(self, ranges: Sequence[Any], most_bytes: float = math.inf) -> tuple[BlockWriter, list[int]]:
        """Encode some chunks; return their blocks and flags. It stops after the chunk that exceeds `most_bytes`."""
        writer = BlockWriter(self.size_bytes * len(ranges) // max(len(self.ranges), 1))
        flags: list[int] = []
        for chunk in ranges:
            if writer.size_bytes > most_bytes:
                break
            flags.append(self.write(writer, chunk))
        return writer, flags

    def finish(self, writer: BlockWriter, flags: Sequence[int], earlier_sizes: Sequence[int] = ()) -> EncodedTensor:
        """Return the encoded tensor, given the flags of all chunks.

        `writer` has the blocks of all chunks, or only the last ones. Then `earlier_sizes` are the stored sizes of the
        blocks before, which the caller has written already, and the first payload is the rest that follows them.
        """
        if self.has_flags:
            writer.write(np.array(flags, np.uint8))
        return EncodedTensor([writer.payload(earlier_sizes), *self.others], {})


class ChunkedCodec(Codec):
    """A codec whose chunks do not depend on each other."""

    def chunks(self, tensor: Tensor, references: References | None = None) -> Chunks:
        """Check the arguments as `encode` does, and cut the tensor into chunks without encoding them."""
        return self._chunks(*self._checked(tensor, references))

    def _encode(self, tensor: Tensor, references: References) -> EncodedTensor:
        chunks = self._chunks(tensor, references)
        return chunks.finish(*chunks.encode(chunks.ranges))

    @abstractmethod
    def _chunks(self, tensor: Tensor, references: References) -> Chunks:
        """Cut a checked, contiguous CPU tensor into chunks."""
