"""The compiled loops give the bytes of numpy's, for every codec and dtype."""

import itertools
import os

import numpy as np
import pytest
import torch
from checkpoint.codecs.cases import INSTANCES, inputs

from hf_trainweights.checkpoint.codecs.base import LOSSY_DTYPES, Codec, EncodedTensor
from hf_trainweights.checkpoint.codecs.coding import compiled
from hf_trainweights.checkpoint.codecs.coding.levels import EXACT, SAME, LevelWriter, _decode_levels
from hf_trainweights.checkpoint.codecs.delta_uniform import DeltaUniform
from hf_trainweights.checkpoint.codecs.moments import LogRank1, UpdateSpace
from hf_trainweights.checkpoint.codecs.rows import RowUniform
from hf_trainweights.files import byte_planes
from hf_trainweights.testing.codecs import SHAPES, bits_equal, copied, decode, name_of

pytestmark = [
    pytest.mark.skipif(compiled.library() is None, reason="nothing was compiled: no C compiler at installation"),
    # torch says so of every complex32 tensor it makes.
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

LOSSY = [DeltaUniform(2.0**-9), DeltaUniform(2.0**-19), LogRank1(1), LogRank1(2), UpdateSpace(0.25), RowUniform(0.5)]
# More than a compiled tile; rows that are, and are not, coded by class; a row longer than a piece.
LARGE = [[1100, 1000], [3, 400_001], [40_000, 9], [1, 1_100_003]]


def by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "library", lambda: None)
    monkeypatch.setattr(byte_planes, "compiled", lambda: None)


def assert_same_bytes(
    monkeypatch: pytest.MonkeyPatch, codec: Codec, tensor: torch.Tensor, references: dict[str, torch.Tensor]
) -> EncodedTensor:
    encoded = codec.encode(tensor, references)
    decoded = decode(codec, encoded, tensor, references)
    with monkeypatch.context() as patch:
        by_numpy(patch)
        expected = codec.encode(tensor, references)
        assert [bits_equal(*pair) for pair in zip(encoded.payloads, expected.payloads, strict=True)] == [
            True for _ in encoded.payloads
        ]
        assert (encoded.params, encoded.bound) == (expected.params, expected.bound)
        assert bits_equal(decode(codec, expected, tensor, references), decoded)
        assert bits_equal(decode(codec, expected, tensor, copied(references), is_anchor_spare=True), decoded)
    return encoded


@pytest.mark.slow
@pytest.mark.parametrize("codec", INSTANCES, ids=name_of)
def test_both_ways_give_the_same_bytes(monkeypatch, codec):
    for dtype, shape in itertools.product(sorted(codec.dtypes, key=str), SHAPES):
        assert_same_bytes(monkeypatch, codec, *inputs(codec, shape, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("codec", LOSSY, ids=name_of)
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_so_do_large_tensors(monkeypatch, codec, shape):
    assert_same_bytes(monkeypatch, codec, *inputs(codec, shape, torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("codec", LOSSY, ids=name_of)
@pytest.mark.parametrize("dtype", sorted(LOSSY_DTYPES, key=str), ids=name_of)
def test_so_do_numbers_of_every_kind(monkeypatch, codec, dtype):
    tensor, references = inputs(codec, [70, 1000], dtype)
    extremes = [0.0, -0.0, float("nan"), float("inf"), float("-inf"), *(s * torch.finfo(dtype).max for s in (1, -1))]
    extremes += [torch.finfo(dtype).tiny, torch.finfo(dtype).smallest_normal / 2, -torch.finfo(dtype).tiny, 1e-7, 3e4]
    generator = torch.Generator().manual_seed(1)
    for each in (tensor, *references.values()):
        places = torch.randint(0, each.numel(), [3000], generator=generator)
        numbers = torch.tensor(extremes, dtype=torch.float32).to(each.dtype)
        each.view(-1)[places] = numbers[torch.randint(0, len(numbers), [3000], generator=generator)]
    encoded = assert_same_bytes(monkeypatch, codec, tensor, references)
    assert len(encoded.payloads[1]), "no element was stored as it is: this tests too little"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_every_float_is_rounded_to_the_dtype_as_pytorch_does(monkeypatch, dtype):
    """A finer step than the dtype's resolution: what an element decodes to is rounded, and so is its error."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    tensor = bits[torch.isfinite(bits)].reshape(64, -1)
    for step in (2.0**-12, 2.0**-3, 1.0, 2.0**9):
        assert_same_bytes(monkeypatch, DeltaUniform(step), tensor, {"anchor": tensor.roll(1)})


def encoded(levels, row_sizes):
    """Return the payload of levels."""

    def place(_, tile_levels, tile_sizes):
        tile_levels[:], tile_sizes[:] = levels, row_sizes
        return 0, 0.0

    writer = LevelWriter(torch.empty(levels.shape))
    writer.write((slice(None), slice(None)), place)
    return writer.payloads()[0]


def assert_decoded(payload, levels):
    back, exact_count = np.zeros_like(levels), 0
    for rows, columns, found, count in _decode_levels(DeltaUniform, payload, *levels.shape):
        back[rows, columns] = found
        exact_count += count
    assert np.array_equal(back, levels)
    assert exact_count == np.count_nonzero(levels == EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("largest", [1, 6, 100, 500, 2000, 8000, 32000])
@pytest.mark.parametrize("shape", [(3, 5), (600, 300), (1, 200_000)], ids=str)
def test_symbols_of_every_width_are_the_same(monkeypatch, largest, shape):
    generator = np.random.default_rng(largest)
    levels = np.rint(generator.normal(0, largest / 3, shape)).clip(-32767, 32766).astype(np.int16)
    few = generator.random(shape)
    levels[few < 0.004], levels[few > 0.997] = EXACT, SAME
    levels[(few > 0.5) & (few < 0.502)] = generator.integers(-32767, 32766)
    row_sizes = np.abs(levels.astype(np.float64)).sum(1)
    payload = encoded(levels, row_sizes)
    assert_decoded(payload, levels)
    by_numpy(monkeypatch)
    assert bits_equal(encoded(levels, row_sizes), payload)
    assert_decoded(payload, levels)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [0, 1, 7, 64, 1000])
def test_planes_are_the_same(monkeypatch, itemsize, count):
    words = np.random.default_rng(count).integers(0, 256, count * itemsize, np.uint8).view(f"u{itemsize}")
    planes, expected = np.empty((itemsize, count), np.uint8), np.empty((itemsize, count), np.uint8)
    byte_planes.split_planes(words.copy(), planes)
    joined = np.empty_like(words)
    byte_planes.join_planes(list(planes), joined)
    assert np.array_equal(joined, words)
    by_numpy(monkeypatch)
    byte_planes.split_planes(words.copy(), expected)
    assert np.array_equal(planes, expected)


def test_a_damaged_library_is_done_without(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "_LIBRARY", tmp_path / "levels.so")
    assert compiled.library.__wrapped__() is None
    (tmp_path / "levels.so").write_bytes(b"no library")
    assert compiled.library.__wrapped__() is None
    assert os.listdir(tmp_path) == ["levels.so"]


def test_a_cpu_without_avx2_does_without(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert compiled.library.__wrapped__() is None
