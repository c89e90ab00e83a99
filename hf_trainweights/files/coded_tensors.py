"""A few tensors as one entropy-coded array of bytes, with a header that describes it and checksums that find damage.

| bytes | content |
|---|---|
| 0 to 3 | `TWC1` |
| 4 to 7 | CRC-32 of all bytes after it, up to the end of the table |
| 8 to 11 | length of the JSON |
| then | JSON: `[[name, dtype, shape], ...]`, no spaces |
| table | for each block two numbers: its stored size and the CRC-32 of its stored bytes |
| blocks | back to back, each coded by `byte_planes.encode_block` |

Numbers are little-endian uint32. A tensor `[*, N, K]` is a run of matrices `[N, K]`, each cut into chunks of 2**18
words. The words of a floating tensor are its elements, and the words of any other tensor are its bytes. A chunk is one
block for each byte of a word, the least significant first (`byte_planes`). So the header tells the size of each block,
and a reader can read one matrix without the others.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from zlib_ng import zlib_ng

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.byte_planes import decode_block, encode_block, join_planes, split_planes, words_of

_MAGIC = b"TWC1"
_PREFIX = struct.Struct("<4sII")
_ENTRY = np.dtype([("size", "<u4"), ("crc32", "<u4")])
_CHUNK_WORDS = 1 << 18
# Up to this many bytes one thread is as fast as several.
_SMALL_BYTES = 1 << 20
_MOST_DIMENSIONS, _MOST_ELEMENTS = 64, 1 << 56

CODED_DTYPES = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
    | {torch.uint8, torch.int8, torch.int16, torch.int32}
)
"""The dtypes of tensors that can be coded."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODED_DTYPES}

_Piece = TypeVar("_Piece")
_Result = TypeVar("_Result")


class _Spec(NamedTuple):
    """Shape and dtype of a tensor, and the numbers of its matrices, chunks and blocks, which follow from them."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def planes(self) -> int:
        return self.dtype.itemsize if self.dtype.is_floating_point else 1

    @property
    def matrices(self) -> int:
        # Empty matrices do not count: a forged header of 170 bytes can claim 2^50 of them, and readers loop over them.
        return math.prod(self.shape[:-2]) if self.matrix_words else 0

    @property
    def matrix_words(self) -> int:
        return math.prod(self.shape[-2:]) * (1 if self.dtype.is_floating_point else self.dtype.itemsize)

    @property
    def chunks(self) -> int:
        return -(-self.matrix_words // _CHUNK_WORDS)

    @property
    def blocks(self) -> int:
        return self.matrices * self.chunks * self.planes

    def chunk(self, number: int) -> slice:
        return slice(number * _CHUNK_WORDS, min((number + 1) * _CHUNK_WORDS, self.matrix_words))


def encode_tensors(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return tensors of `CODED_DTYPES` as one uint8 CPU tensor `[bytes]`; equal tensors give equal bytes.

    Examples:
        >>> coded = encode_tensors({"codes": torch.zeros(1000, 1000, dtype=torch.int8)})
        >>> len(coded) < 200, CodedTensors(coded, "weight").read("codes").shape
        (True, torch.Size([1000, 1000]))
    """
    specs = {name: _Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    all_blocks: list[np.ndarray] = []
    for name, spec in specs.items():
        words = _words(tensors[name].detach().cpu().contiguous()).reshape(spec.matrices, spec.matrix_words)
        pieces = [(matrix, spec.chunk(number), spec) for matrix in words for number in range(spec.chunks)]
        all_blocks += [block for blocks in _map(_encode_chunk, pieces, words.nbytes) for block in blocks]
    described = [[name, str(spec.dtype).removeprefix("torch."), list(spec.shape)] for name, spec in specs.items()]
    text = json.dumps(described, separators=(",", ":")).encode()
    table = np.array([(len(block), zlib_ng.crc32(block.data)) for block in all_blocks], _ENTRY).tobytes()
    checked = struct.pack("<I", len(text)) + text + table
    head = _MAGIC + struct.pack("<I", zlib_ng.crc32(checked)) + checked
    return torch.from_numpy(np.concatenate([np.frombuffer(head, np.uint8), *all_blocks]))


def _encode_chunk(piece: tuple[np.ndarray, slice, _Spec]) -> list[np.ndarray]:
    matrix, chunk, spec = piece
    words = matrix[chunk]
    if spec.planes == 1:
        return [encode_block(words)]
    planes = np.empty((spec.planes, len(words)), np.uint8)
    split_planes(words, planes, spec.dtype)
    return [encode_block(plane) for plane in planes]


class CodedTensors:
    """Reads the tensors that `encode_tensors` coded, all or one matrix at a time, and checks them first.

    Args:
        coded: Uint8 `[bytes]`, on any device.
        where: The name of the bytes in errors.
    """

    def __init__(self, coded: Tensor, where: str):
        self._where = where
        if coded.dtype != torch.uint8 or coded.dim() != 1:
            raise self._corrupt("coded bytes", "uint8 of 1 dimension", f"{coded.dtype} of {coded.dim()}")
        self._data = coded.detach().cpu().contiguous().numpy()
        magic, crc32, json_bytes = _PREFIX.unpack(self._data[: _PREFIX.size].tobytes().ljust(_PREFIX.size, b"\0"))
        if magic != _MAGIC:
            raise self._corrupt("the first bytes", repr(_MAGIC), repr(magic))
        start = _PREFIX.size + json_bytes
        self.specs = self._read_specs(bytes(self._data[_PREFIX.size : start]))
        firsts = list(accumulate((spec.blocks for spec in self.specs.values()), initial=0))
        end = start + firsts[-1] * _ENTRY.itemsize
        if end > len(self._data) or zlib_ng.crc32(self._data[8:end].data) != crc32:
            raise self._corrupt("the header", "the one that its checksum is of", "another one, or the end")
        table = self._data[start:end].view(_ENTRY)
        self._firsts = dict(zip(self.specs, firsts, strict=False))
        self._crc32s = table["crc32"].tolist()
        self._edges = list(accumulate(table["size"].tolist(), initial=end))
        if self._edges[-1] != len(self._data):
            raise self._corrupt("the blocks", f"{self._edges[-1]} bytes with the header", f"{len(self._data)}")

    def read(self, name: str, matrix: int | None = None) -> Tensor:
        """Return a new CPU tensor, or its matrix `[N, K]` number `matrix`; CorruptFileError: a block is damaged."""
        spec = self.specs[name]
        shape = spec.shape if matrix is None else spec.shape[-2:]
        try:
            out = torch.empty(shape, dtype=spec.dtype, device="cpu")
        except RuntimeError as error:
            raise self._corrupt("the shape", "a tensor that fits into memory", str(shape)) from error
        if not out.numel():
            return out
        numbers = range(spec.matrices) if matrix is None else [range(spec.matrices)[matrix]]
        words = _words(out).reshape(len(numbers), spec.matrix_words)
        pieces = [
            (words[row], chunk, self._firsts[name] + (number * spec.chunks + chunk) * spec.planes, spec)
            for row, number in enumerate(numbers)
            for chunk in range(spec.chunks)
        ]
        _map(self._decode_chunk, pieces, words.nbytes)
        return out

    def _decode_chunk(self, piece: tuple[np.ndarray, int, int, _Spec]) -> None:
        matrix, number, first, spec = piece
        words = matrix[spec.chunk(number)]
        planes = [self._block(first + plane, len(words)) for plane in range(spec.planes)]
        if spec.planes == 1:
            words[:] = planes[0]
        else:
            join_planes(planes, words, spec.dtype)

    def _block(self, index: int, size: int) -> np.ndarray:
        start = self._edges[index]
        stored = self._data[start : self._edges[index + 1]]
        where = f"block {index} at byte {start}"
        if zlib_ng.crc32(stored.data) != self._crc32s[index]:
            raise self._corrupt(where, f"the CRC-32 {self._crc32s[index]:08x}", "another one")
        return decode_block(stored, size, lambda expected, found: self._corrupt(where, expected, found))

    def _read_specs(self, text: bytes) -> dict[str, _Spec]:
        expected = "names, dtypes and shapes in JSON"
        try:
            specs = {str(name): _Spec(tuple(shape), _DTYPES[dtype]) for name, dtype, shape in json.loads(text)}
            are_shapes = all(_is_shape(spec.shape) for spec in specs.values())
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise self._corrupt("the header", expected, str(error)[:200]) from error
        if not are_shapes:
            raise self._corrupt("the header", expected, "a shape that no tensor has")
        return specs

    def _corrupt(self, part: str, expected: str, found: str) -> CorruptFileError:
        next_step = "The file is damaged; download it again, or save it again from the source."
        return CorruptFileError(f"{self._where}, {part}", expected, found, next_step)


def _is_shape(shape: tuple[object, ...]) -> bool:
    sizes = [size for size in shape if type(size) is int and size >= 0]
    plain = len(sizes) == len(shape) <= _MOST_DIMENSIONS
    return plain and math.prod(max(1, size) for size in sizes) <= _MOST_ELEMENTS


def _words(tensor: Tensor) -> np.ndarray:
    """Return the words of a contiguous tensor in a 1-D view."""
    plain = tensor if tensor.numel() else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return words_of(plain) if tensor.dtype.is_floating_point else plain.reshape(-1).view(torch.uint8).numpy()


def _map(function: Callable[[_Piece], _Result], pieces: Sequence[_Piece], size_bytes: int) -> list[_Result]:
    """Return the result for each piece, in order. Many bytes are shared by threads, because zstd releases the GIL."""
    threads = min(torch.get_num_threads(), len(pieces))
    if threads < 2 or size_bytes <= _SMALL_BYTES:
        return [function(piece) for piece in pieces]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, pieces))
