import pytest
import torch

from hf_trainweights.checkpoint.codecs import exact
from hf_trainweights.checkpoint.codecs.coding.rank1 import decode_means, encode_means, log_means
from hf_trainweights.checkpoint.codecs.exact import Planes, PlanesRank1
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.testing.codecs import bits_equal, decode


def squares(*shape, rank1=3.0, rest=1.5, seed=0):
    """Returns numbers whose log2 is a row's plus a column's plus noise of these spreads."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(shape[0], 1, generator=generator) * rank1
    columns = torch.randn(shape[1], generator=generator) * rank1
    return (rows + columns + torch.randn(shape, generator=generator) * rest - 30).exp2()


def bits(codec, tensor):
    encoded = codec.encode(tensor)
    assert bits_equal(decode(codec, encoded, tensor), tensor)
    return 8 * encoded.payload_bytes / tensor.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_and_columns_are_free(dtype):
    tensor = squares(700, 900).mul_(2.0**22 if dtype == torch.float16 else 1).to(dtype)
    assert bits(PlanesRank1(), tensor) < bits(Planes(), tensor) - (0.4 if dtype == torch.float16 else 0.8)


def test_what_is_not_rank1_takes_no_more_than_plain():
    noise = torch.randint(-(2**31), 2**31, [600, 600], generator=torch.Generator().manual_seed(0)).to(torch.int32)
    assert bits(PlanesRank1(), noise.view(torch.float32)) < 32.05
    weights = torch.randn(600, 600, generator=torch.Generator().manual_seed(0)) * 0.02
    assert bits(PlanesRank1(), weights) < bits(Planes(), weights) + 0.05


def test_zeros_negatives_and_what_is_not_finite_come_back():
    tensor = squares(600, 700)
    tensor[::3] = 0
    tensor[:, ::5] = 0
    bits(PlanesRank1(), tensor)
    tensor[1, :8] = torch.tensor([-0.0, -1e-9, torch.nan, torch.inf, -torch.inf, 1e-45, 3e38, -1e-45])
    bits(PlanesRank1(), tensor)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(700, 400), (20, 70_000), (17, 300_000)])
def test_every_part_of_a_tile_is_put_in_its_place(shape):
    tensor = squares(*shape)
    tensor[:, ::7] = 0
    assert bits(PlanesRank1(), tensor) < bits(Planes(), tensor)


def test_the_code_that_wraps_around_to_the_one_of_zero_is_avoided():
    # With one mean for all, 2**-20, these are the predicted number and its negative: bits that differ by 2**31.
    tensor = torch.full([64, 64], 2.0**-20)
    tensor[3, 3] = -(2.0**-20)
    tensor[5, 5] = 0
    bits(PlanesRank1(), tensor)


@pytest.mark.parametrize(
    ("shape", "stored"), [((20, 30), 50), ((20, 15), 15), ((15, 20), 15), ((15, 15), 0), ((0, 1), 0)]
)
def test_means_are_stored_where_they_are_worth_it(shape, stored):
    means = log_means(torch.full(shape, 2.0**-9))
    payload = encode_means(*means)
    assert len(payload) <= 4 + 2 * stored
    back = decode_means(PlanesRank1, payload, *shape)
    assert all(torch.equal(*pair) for pair in zip(means, back, strict=True))
    total = (means[0][:, None] + means[1]) / 128
    assert torch.equal(total, torch.full(shape, -9.0 if stored else 0.0))


def test_means_ignore_zeros_and_signs_and_what_is_no_number():
    tensor = squares(300, 400, rest=0)
    expected = log_means(tensor)
    tensor[::2] = 0
    tensor[1::4] *= -1
    tensor[:, 5] = torch.nan
    rows, columns = log_means(tensor)
    change = (rows[3::4, None] + columns) - (expected[0][3::4, None] + expected[1])
    # Read from the bits, a logarithm is off by up to .09, and means are over samples.
    assert change.abs()[:, 6:].max() <= 0.1 * 128
    assert (rows[::2] == 0).all()


def test_means_of_another_shape_are_errors():
    payload = encode_means(*log_means(squares(20, 30)))
    with pytest.raises(CorruptFileError, match="codec planes-rank1, block 0 at byte 0: expected"):
        decode_means(PlanesRank1, payload, 20, 31)


def test_a_shape_that_memory_does_not_hold_is_an_error_before_its_means_are_made(monkeypatch):
    def full(*args):
        raise MemoryError

    tensor = squares(70, 90)
    encoded = PlanesRank1().encode(tensor)
    monkeypatch.setattr(exact, "empty", full)
    monkeypatch.delattr(exact, "decode_means")
    with pytest.raises(CorruptFileError, match="shape: expected a tensor that fits into memory"):
        decode(PlanesRank1(), encoded, tensor)
