"""Shared entropy coding: blocks of bytes through zstd's Huffman coder.

The reader knows the length of each *block* of bytes beforehand, from the tensor's shape, so no frame can make it
allocate more. A payload is

| part | content |
|---|---|
| blocks | back to back; each either as it is or, when that is smaller, as one standard zstd frame |
| table | one uint32 per block: its stored size; equal to the block's own size means stored as it is |

`hf_trainweights.files.huffman` codes each block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import Codec
from hf_trainweights.checkpoint.codecs.coding.memory import ByteBuffer
from hf_trainweights.files.huffman import decode_block, encode_block

CHUNK = 1 << 18
"""Elements coded together: large enough for good statistics, small enough for the processor's cache."""


def chunk_ranges(count: int, size: int = CHUNK) -> Iterator[slice]:
    """Yield the slices of `size` elements, the last one shorter, that make up `count` elements."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def chunk_count(count: int) -> int:
    """Return how many slices `chunk_ranges` yields."""
    return -(-count // CHUNK)


class BlockWriter:
    """Collects blocks into one payload.

    Args:
        expected_bytes: About how long it becomes.
    """

    def __init__(self, expected_bytes: int = 0) -> None:
        self._data = ByteBuffer(expected_bytes)
        self._sizes: list[int] = []

    @property
    def size_bytes(self) -> int:
        """How long all blocks are."""
        return len(self._data)

    def write(self, block: np.ndarray) -> None:
        """Append a 1-D contiguous uint8 array."""
        stored = encode_block(block)
        self._data.append(stored)
        self._sizes.append(len(stored))

    def blocks(self) -> tuple[Tensor, list[int]]:
        """Return all blocks, 1-D uint8, and their stored sizes."""
        return torch.from_numpy(self._data.view()), self._sizes

    def payload(self, earlier_sizes: Sequence[int] = ()) -> Tensor:
        """Return all blocks and the table of their sizes, those of earlier blocks first, 1-D uint8."""
        self._data.append(np.array([*earlier_sizes, *self._sizes], "<u4").view(np.uint8))
        return self.blocks()[0]


class BlockReader:
    """Reads the blocks of one payload in any order; checks everything before it is used.

    Args:
        codec: Whose payload it is, for messages.
        payload: 1-D uint8 tensor.
        count: Number of blocks.

    Raises:
        CorruptFileError: The payload does not hold `count` blocks.
    """

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
        """Return block `index`, uint8 [size], not to be written to; CorruptFileError: damaged, or of another size."""
        start = self._edges[index]
        stored = self._data[start : self._edges[index + 1]]
        where = f"block {index} at byte {start}"
        return decode_block(stored, size, lambda expected, found: self._codec.corrupt(where, expected, found))


def int16_to_bytes(numbers: np.ndarray) -> np.ndarray:
    """Return the low bytes of int16 numbers, then the high ones, uint8."""
    return np.concatenate([numbers.astype(np.uint8), (numbers >> 8).astype(np.uint8)])


def bytes_to_int16(planes: np.ndarray) -> np.ndarray:
    """Undo `int16_to_bytes`."""
    low, high = planes.reshape(2, -1)
    return high.astype(np.int16) * np.int16(256) + low
