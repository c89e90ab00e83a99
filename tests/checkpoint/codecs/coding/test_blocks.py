import math
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import zstandard

from hf_trainweights.checkpoint.codecs.base import LOSSY_DTYPES
from hf_trainweights.checkpoint.codecs.coding.blocks import (
    CHUNK,
    TILE,
    BlockReader,
    BlockWriter,
    ByteBuffer,
    bytes_to_int16,
    chunk_ranges,
    empty,
    int16_to_bytes,
    matrix_shape,
    rounded_to,
    scratch,
    tiles,
    to_float32,
)
from hf_trainweights.checkpoint.codecs.exact import Raw
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.testing.codecs import bits_equal

NOISE = np.random.default_rng(0).integers(0, 256, 5000, np.uint8)


def payload_of(*blocks):
    writer = BlockWriter()
    for block in blocks:
        writer.write(block)
    return writer.payload()


def test_blocks_can_be_read_in_any_order_and_more_than_once():
    blocks = [NOISE, np.zeros(100_000, np.uint8), np.empty(0, np.uint8), NOISE % 5]
    reader = BlockReader(Raw, payload_of(*blocks), len(blocks))
    for index in (3, 0, 2, 1, 0, 3):
        assert np.array_equal(reader.read(index, len(blocks[index])), blocks[index])


def test_blocks_that_are_read_cannot_be_written_to():
    reader = BlockReader(Raw, payload_of(NOISE, NOISE % 2), 2)
    for index in (0, 1):
        with pytest.raises(ValueError, match="read-only"):
            reader.read(index, len(NOISE))[:] = 1


def test_threads_do_not_share_their_coders():
    blocks = [np.full(100_000, number, np.uint8) for number in range(4)]
    expected = [payload_of(block) for block in blocks]
    with ThreadPoolExecutor(4) as pool:
        payloads = list(pool.map(payload_of, blocks * 50))
        read = list(pool.map(lambda payload: BlockReader(Raw, payload, 1).read(0, 100_000), payloads))
    assert all(torch.equal(payload, expected[index % 4]) for index, payload in enumerate(payloads))
    assert all((block == index % 4).all() for index, block in enumerate(read))


def test_noise_costs_four_bytes_more_and_few_symbols_little_more_than_their_entropy():
    assert len(payload_of(NOISE)) == len(NOISE) + 4
    symbols = np.random.default_rng(0).choice(16, 100_000, p=np.arange(16) / 120).astype(np.uint8)
    share = np.bincount(symbols)[1:] / len(symbols)
    entropy_bytes = -(share * np.log2(share)).sum() * len(symbols) / 8
    assert entropy_bytes < len(payload_of(symbols)) < 1.01 * entropy_bytes + 150


def test_coded_blocks_are_standard_zstd_frames():
    payload = payload_of(NOISE % 3)
    frame = payload[:-4].numpy().tobytes()
    assert zstandard.ZstdDecompressor().decompress(frame) == (NOISE % 3).tobytes()


def test_block_of_another_size_is_an_error():
    reader = BlockReader(Raw, payload_of(NOISE, NOISE % 3), 2)
    for index, size in ((0, 4999), (0, 5001), (1, 4999), (1, 5001), (1, 0)):
        with pytest.raises(CorruptFileError, match=rf"codec raw, block {index} at byte \d+: expected .*{size} bytes"):
            reader.read(index, size)


def test_another_number_of_blocks_is_an_error():
    payload = payload_of(NOISE, NOISE % 3)
    for count in (0, 1, 3, 10**9):
        with pytest.raises(CorruptFileError, match=r"codec raw, payload: expected .* bytes"):
            BlockReader(Raw, payload, count)


@pytest.mark.parametrize("count", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_chunks_cover_every_element_once(count):
    ranges = list(chunk_ranges(count))
    assert len(ranges) == math.ceil(count / CHUNK)
    assert [position for each in ranges for position in (each.start, each.stop)] == sorted(
        [0, *[each.stop for each in ranges[:-1]] * 2, count] if ranges else []
    )


def test_every_int16_survives_being_split_into_bytes():
    numbers = np.arange(-(2**15), 2**15).astype(np.int16)
    planes = int16_to_bytes(numbers)
    assert planes[[0, 1, 2**16, 2**16 + 256]].tolist() == [0, 1, 128, 129]
    assert np.array_equal(bytes_to_int16(planes), numbers)
    assert len(bytes_to_int16(int16_to_bytes(numbers[:0]))) == 0


@pytest.mark.parametrize("expected_bytes", [0, 4, 5, 1 << 24])
def test_a_buffer_has_what_was_appended_and_keeps_no_more_memory(expected_bytes):
    tracemalloc.start()
    buffer = ByteBuffer(expected_bytes)
    for part in ([1, 2], [], [3, 4], [5]):
        buffer.append(np.array(part, np.uint8))
    assert len(buffer) == 5
    assert buffer.finish().tolist() == [1, 2, 3, 4, 5]
    kept_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept_bytes < 10_000


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ([], (1, 1)),
        ([5], (1, 5)),
        ([0, 5], (0, 1)),
        ([7, 3], (7, 3)),
        ([512, 512, 3], (512, 1536)),
        ([64, 64, 3, 3], (64, 576)),
        ([8, 1024, 512], (8192, 512)),
        ([1, 1, 9], (1, 9)),
    ],
)
def test_matrix_is_the_squarest_split(shape, expected):
    assert matrix_shape(torch.Size(shape)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [(0, 1), (1, 1), (5, 7), (1, 3 * TILE + 1), (3, TILE + 5), (TILE + 1, 1), (1000, 999)]
)
def test_tiles_cover_every_element_once_in_row_major_order(shape):
    seen = torch.arange(math.prod(shape)).view(shape)
    parts = [seen[tile] for tile in tiles(*shape)]
    assert all(part.is_contiguous() and 0 < part.numel() <= TILE for part in parts)
    assert torch.equal(torch.cat([seen.new_empty(0), *[part.reshape(-1) for part in parts]]), seen.view(-1))


@pytest.mark.parametrize("dtype", sorted(LOSSY_DTYPES, key=str), ids=str)
def test_float32_is_worked_on_where_it_lies_and_other_dtypes_in_scratch(dtype):
    tile = torch.tensor([[1 / 3, -0.0, torch.inf]]).to(dtype)
    values = to_float32(tile, "x")
    assert bits_equal(torch.from_numpy(values), tile.to(torch.float32))
    assert (values.ctypes.data == tile.data_ptr()) == (dtype == torch.float32)


@pytest.mark.parametrize("dtype", sorted(LOSSY_DTYPES, key=str), ids=str)
def test_values_are_rounded_once_to_the_dtype(dtype):
    values = np.array([1 / 3, 1e-9, 70000.0, np.nan], np.float32)
    expected = torch.from_numpy(values).to(dtype).to(torch.float32)
    np.testing.assert_array_equal(rounded_to(dtype, values), expected.numpy())


def test_threads_do_not_share_scratch():
    mine = scratch("levels", [2, 3])
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(scratch, "levels", [2, 3]).result()
    assert not np.shares_memory(mine, other)
    assert np.shares_memory(mine, scratch("levels", [3, 2]))
    assert not np.shares_memory(mine, scratch("decoded", [2, 3]))


def test_scratch_grows_to_the_largest_shape_of_its_use():
    assert scratch("grown", [2, 3], np.uint8).nbytes == 6
    assert scratch("grown", [5, 7]).shape == (5, 7)
    assert scratch("grown", [5, 7]).dtype == np.float32
    assert np.shares_memory(scratch("grown", [140], np.uint8), scratch("grown", [5, 7]))


@pytest.mark.parametrize(
    ("shape", "is_aligned"),
    [((1024, 1024), True), ((2816, 1024), True), ((1 << 22, 3), True), ((1025, 1024), False), ((1000, 1000), False)],
)
def test_large_tensors_begin_with_a_huge_page_unless_the_last_one_would_be_nearly_empty(monkeypatch, shape, is_aligned):
    allocated, allocate = [], np.empty
    monkeypatch.setattr(np, "empty", lambda *args: allocated.append(allocate(*args)) or allocated[-1])
    tensor = empty(shape, torch.float32)
    assert tensor.shape == shape
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert allocated[0].nbytes == tensor.nbytes + (2 << 20) * is_aligned
    assert not is_aligned or tensor.data_ptr() % (2 << 20) == 0
