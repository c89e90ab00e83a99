import pytest
import torch

from hf_trainweights.checkpoint.codecs.coding.blocks import BlockReader
from hf_trainweights.checkpoint.codecs.exact import Planes, PlanesDelta
from hf_trainweights.testing.codecs import bits_equal, decode


def normal(*shape, seed=0, scale=0.02):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(scale)


def bits(codec, tensor, references=None):
    encoded = codec.encode(tensor, references)
    assert bits_equal(decode(codec, encoded, tensor, references), tensor)
    return 8 * encoded.payload_bytes / max(tensor.numel(), 1)


@pytest.mark.parametrize("codec", [Planes(), PlanesDelta()], ids=["planes", "planes-delta"])
def test_every_bfloat16_and_float16_and_byte_comes_back(codec):
    words = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16, torch.int16, torch.uint16):
        bits(codec, words.view(dtype), {"anchor": words.flip(0).view(dtype)})
    words = torch.arange(2**8, dtype=torch.int32).to(torch.uint8)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
        bits(codec, words.view(dtype), {"anchor": words.flip(0).view(dtype)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_special_floats_come_back(dtype):
    integer = torch.int32 if dtype == torch.float32 else torch.int64
    exponents = torch.tensor([0, 1, torch.finfo(dtype).bits - 2, -1], dtype=integer)
    top = (torch.arange(4096, dtype=integer) << (torch.finfo(dtype).bits - 12))[:, None]
    words = (top | exponents).view(-1)
    bits(Planes(), words.view(dtype))
    bits(PlanesDelta(), words.view(dtype), {"anchor": words.flip(0).view(dtype)})


@pytest.mark.parametrize(
    ("dtype", "most_bits"),
    [(torch.float32, 26.8), (torch.bfloat16, 10.8), (torch.float16, 14.2), (torch.float64, 55.9)],
)
def test_normal_weights_take_no_more_than_mantissa_and_entropy_of_the_exponent(dtype, most_bits):
    # 8 of 32 bits are the exponent, and those of normal numbers hold 2.55 bits.
    assert bits(Planes(), normal(512, 512).to(dtype)) < most_bits


def test_small_integers_take_no_more_than_their_entropy():
    tokens = torch.randint(0, 256, [200_000], generator=torch.Generator().manual_seed(0))
    assert bits(Planes(), tokens) < 8.1


def test_noise_hardly_grows():
    noise = torch.randint(0, 2**31, [2**18], generator=torch.Generator().manual_seed(0)).to(torch.int32) * 2
    assert bits(Planes(), noise) < 32.01
    assert bits(PlanesDelta(), noise, {"anchor": noise.flip(0)}) < 32.01


def test_sparse_moments_take_little_more_than_their_nonzero_rows():
    moments = normal(2000, 384)
    moments[torch.arange(2000) % 8 != 0] = 0
    assert bits(Planes(), moments) < 27 / 8 + 0.2


def test_a_close_anchor_helps_and_a_strange_one_does_not_hurt():
    weight, other = normal(512, 512), normal(512, 512, seed=1)
    plain = bits(Planes(), weight)
    assert bits(PlanesDelta(), weight, {"anchor": other}) < plain + 0.01
    assert bits(PlanesDelta(), weight, {"anchor": weight + normal(512, 512, seed=2, scale=2e-5)}) < plain - 7
    assert bits(PlanesDelta(), weight, {"anchor": weight}) < 0.01
    assert bits(PlanesDelta(), weight) == pytest.approx(plain, abs=0.001)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_planes_hold_the_bytes_of_each_significance(dtype):
    words = torch.arange(70_000).to(dtype).mul_(3)
    payload = Planes().encode(words).payloads[0]
    expected = words.view(torch.uint8).view(-1, dtype.itemsize).t().numpy()
    reader = BlockReader(Planes, payload, dtype.itemsize)
    for index, plane in enumerate(expected):
        assert (reader.read(index, len(words)) == plane).all()


def test_each_chunk_is_plain_or_a_difference_as_is_best():
    changed, same = normal(2**18), normal(2**18, seed=1)
    anchor = torch.cat([normal(2**18, seed=2), same])
    mixed = torch.cat([changed, same])
    assert bits(PlanesDelta(), mixed, {"anchor": anchor}) < bits(Planes(), changed) / 2 + 0.01


def test_anchor_is_not_needed_where_no_chunk_uses_it():
    weight, other = normal(64, 64), normal(64, 64, seed=1)
    encoded = PlanesDelta().encode(weight, {"anchor": other})
    assert torch.equal(decode(PlanesDelta(), encoded, weight), weight)
