"""What a coded array promises: the same tensors, one matrix by itself, and an error for any damage."""

from __future__ import annotations

import json
import struct
import zlib

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files import coded_tensors
from hf_trainweights.files.coded_tensors import CODED_DTYPES, CodedTensors, encode_tensors

SHAPES = [(), (5,), (3, 7), (2, 3, 40), (0, 4), (2, 0, 3), (1, 1)]
each_dtype = pytest.mark.parametrize("dtype", sorted(CODED_DTYPES, key=str), ids=str)


def values(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    return numbers.to(dtype) if dtype.is_floating_point else numbers.to(torch.int16).to(dtype)


def same(first: Tensor, second: Tensor) -> bool:
    kinds = (first.dtype, first.shape) == (second.dtype, second.shape)
    return kinds and first.contiguous().view(-1).view(torch.uint8).equal(second.contiguous().view(-1).view(torch.uint8))


def decode_tensors(coded: Tensor, where: str) -> dict[str, Tensor]:
    reader = CodedTensors(coded, where)
    return {name: reader.read(name) for name in reader.specs}


@each_dtype
def test_every_dtype_and_shape_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    tensors = {str(shape): values(*shape, dtype=dtype) for shape in SHAPES}
    decoded = decode_tensors(encode_tensors(tensors), "weight")
    assert list(decoded) == list(tensors)
    assert all(same(decoded[name], tensor) for name, tensor in tensors.items())


def test_infinities_nan_and_negative_zero_come_back() -> None:
    odd = torch.tensor([[float("nan"), float("inf"), -float("inf"), -0.0, 1e-45]])
    assert same(decode_tensors(encode_tensors({"a": odd}), "weight")["a"], odd)


def test_several_chunks_and_threads_give_what_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a": values(3, 50, 40, dtype=torch.int8), "b": values(70, 90, dtype=torch.bfloat16)}
    monkeypatch.setattr(coded_tensors, "_CHUNK_WORDS", 1000)
    alone = encode_tensors(tensors)
    monkeypatch.setattr(coded_tensors, "_SMALL_BYTES", 0)
    assert torch.equal(encode_tensors(tensors), alone)
    assert all(same(tensor, tensors[name]) for name, tensor in decode_tensors(alone, "weight").items())


def test_equal_tensors_give_equal_bytes_whatever_their_strides() -> None:
    codes = values(64, 32, dtype=torch.int8)
    assert torch.equal(encode_tensors({"a": codes.t().contiguous().t()}), encode_tensors({"a": codes}))


def test_one_expert_is_read_without_the_blocks_of_the_others() -> None:
    experts = values(4, 64, 128, dtype=torch.int8)
    coded = encode_tensors({"qdata": experts, "scale": values(4, 64, 1, dtype=torch.bfloat16)})
    reader = CodedTensors(coded, "experts")
    first, last = reader._edges[2], reader._edges[3]
    damaged = coded.clone()
    damaged[reader._edges[0] : first] = 0
    damaged[last : reader._edges[4]] = 0
    assert same(CodedTensors(damaged, "experts").read("qdata", 2), experts[2])
    with pytest.raises(CorruptFileError, match=r"experts, block 0 at byte \d+: expected the CRC-32"):
        CodedTensors(damaged, "experts").read("qdata")


def test_few_symbols_take_little_more_than_their_entropy() -> None:
    codes = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)).mul_(2.5).round_().to(torch.int8)
    share = torch.bincount(codes.flatten().long() + 128) / codes.numel()
    entropy_bits = -(share[share > 0] * share[share > 0].log2()).sum().item()
    assert entropy_bits < 8 * len(encode_tensors({"a": codes})) / codes.numel() < 1.02 * entropy_bits


def small() -> Tensor:
    return encode_tensors({"qdata": values(8, 64, dtype=torch.int8), "scale": values(8, 1, dtype=torch.float32)})


@pytest.mark.slow
def test_every_flipped_bit_is_an_error() -> None:
    coded = small()
    for place in range(len(coded)):
        for bit in range(8):
            damaged = coded.clone()
            damaged[place] ^= 1 << bit
            with pytest.raises(CorruptFileError, match=r"layer, .*: expected"):
                decode_tensors(damaged, "layer")


def test_every_truncation_and_any_bytes_more_are_an_error() -> None:
    coded = small()
    for length in range(len(coded)):
        with pytest.raises(CorruptFileError, match=r"layer, .*: expected"):
            decode_tensors(coded[:length], "layer")
    with pytest.raises(CorruptFileError, match="the blocks: expected"):
        decode_tensors(torch.cat([coded, coded[:1]]), "layer")


def sealed(listed: object, sizes: list[int], data: bytes = b"") -> Tensor:
    """Return bytes whose checksums are right, whatever they say."""
    text = json.dumps(listed).encode()
    table = b"".join(struct.pack("<II", size, zlib.crc32(data)) for size in sizes)
    rest = struct.pack("<I", len(text)) + text + table
    head = b"TWC1" + struct.pack("<I", zlib.crc32(rest)) + rest + data
    return torch.from_numpy(np.frombuffer(head, np.uint8).copy())


HOSTILE = {
    "no list": 3,
    "no tensors but a name": [["a"]],
    "an unknown dtype": [["a", "complex64", [1, 1]]],
    "a negative size": [["a", "int8", [-1, -1]]],
    "a size that is no integer": [["a", "int8", [1.5, 1]]],
    "a size that is a truth": [["a", "int8", [True, 1]]],
    "a shape without end": [["a", "int8", [1] * 65]],
    "sizes whose product overflows": [["a", "int8", [1 << 40, 1 << 40]]],
    "many empty matrices": [["a", "int8", [1 << 60, 0, 0]]],
    "more blocks than there are": [["a", "int8", [1 << 30, 1 << 20]]],
}


@pytest.mark.parametrize("listed", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_header_is_refused_before_anything_is_allocated(listed: object) -> None:
    with pytest.raises(CorruptFileError, match="layer, the header: expected"):
        decode_tensors(sealed(listed, []), "layer")


def test_a_block_of_another_size_than_the_shape_says_is_refused() -> None:
    with pytest.raises(CorruptFileError, match=r"layer, block 0 at byte \d+: expected a frame of 100 bytes"):
        decode_tensors(sealed([["a", "int8", [10, 10]]], [7], b"1234567"), "layer")


@pytest.mark.parametrize("coded", [torch.zeros(0, dtype=torch.uint8), torch.zeros(99, dtype=torch.uint8)])
def test_other_bytes_are_refused(coded: Tensor) -> None:
    with pytest.raises(CorruptFileError, match="layer, the first bytes: expected"):
        decode_tensors(coded, "layer")


def test_other_tensors_are_refused() -> None:
    with pytest.raises(CorruptFileError, match="layer, coded bytes: expected uint8"):
        decode_tensors(torch.zeros(9, 9, dtype=torch.int8), "layer")


@pytest.mark.parametrize("shape", [(2**50, 0, 1), (2**28, 0, 4), (2**20, 2**20, 0)])
def test_matrices_without_elements_take_no_time(shape: tuple[int, ...]) -> None:
    tensor = torch.empty(shape)
    reader = CodedTensors(encode_tensors({"empty": tensor}), "w")
    assert reader.read("empty").shape == shape
    assert reader.read("empty", 0).shape == shape[-2:]
