import math

import numpy as np
import pytest
import torch
from checkpoint.codecs.cases import error

from hf_trainweights.checkpoint.codecs.moments import LogRank1, _log2, _mantissas
from hf_trainweights.errors import ConfigError
from hf_trainweights.testing.codecs import bits_equal, decode


def squares(*shape, seed=0, rank1=4.0, rest=1.0):
    """Returns numbers whose log2 is a row's plus a column's plus noise of these spreads."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(shape, generator=generator) * rest
    rows = torch.randn(shape[0], *[1] * (len(shape) - 1), generator=generator) * rank1
    columns = torch.randn(shape[1:], generator=generator) * rank1
    return (flat + rows + columns - 40).exp2()


def roundtrip(tensor, step=1):
    codec = LogRank1(step)
    encoded = codec.encode(tensor)
    decoded = decode(codec, encoded, tensor)
    assert error(codec, tensor, decoded, {}) <= encoded.bound
    return encoded, decoded


@pytest.mark.parametrize(("step", "most_bits"), [(1, 2.2), (2, 1.4)])
def test_rows_and_columns_are_free(step, most_bits):
    tensor = squares(500, 900)
    encoded, _ = roundtrip(tensor, step)
    assert 8 * encoded.payload_bytes / tensor.numel() < most_bits
    assert step * 0.49 < encoded.bound < step * 0.51


@pytest.mark.parametrize(
    "shape", [[], [1], [5], [100], [20, 1], [1, 20], [16, 16], [15, 300], [8, 4, 3, 3], [4, 40, 50]]
)
def test_any_shape_works(shape):
    tensor = squares(*shape) if shape else torch.tensor(3e-9)
    encoded, decoded = roundtrip(tensor)
    assert encoded.bound < 0.51
    assert (decoded > 0).all()


def test_zeros_stay_zeros_and_nothing_else_becomes_one():
    tensor = squares(100, 200)
    tensor[::3] = 0
    tensor[:, ::7] = 0
    tensor[1, :8] = torch.tensor([1e-45, 3e-45, 1e-40, 1.2e-38, 3e38, 1.0, -0.0, 0.0])
    _, decoded = roundtrip(tensor)
    assert torch.equal(decoded == 0, tensor == 0)


def test_denormal_rows_take_few_bits_too():
    tensor = squares(200, 300)
    tensor[::2] *= 2.0**-95
    encoded, decoded = roundtrip(tensor)
    assert torch.equal(decoded == 0, tensor == 0)
    assert 8 * encoded.payload_bytes / tensor.numel() < 5


def test_logarithms_are_right_for_every_positive_number():
    x = np.arange(1, 0x7F800000, 997, np.uint32).view(np.float32)
    with np.errstate(over="ignore"):
        errors = np.abs(_log2(x) - np.log2(x.astype(np.float64)))
    assert errors.max() < 8e-6  # float32 rounds numbers near 149 by up to 7.6e-6
    assert errors[(x > 0.25) & (x < 4)].max() < 2e-7


def test_what_is_negative_or_not_finite_is_stored_exactly():
    tensor = squares(40, 50)
    tensor[2, :5] = torch.tensor([torch.nan, torch.inf, -torch.inf, -1e-9, -3.0])
    encoded, decoded = roundtrip(tensor)
    assert bits_equal(decoded[2, :5], tensor[2, :5])
    assert encoded.bound < 0.51


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_does_not_underflow(dtype):
    tensor = squares(64, 64, rank1=2.0).mul_(2.0**20).to(dtype)
    _, decoded = roundtrip(tensor)
    assert torch.equal(decoded == 0, tensor == 0)


def test_powers_of_two_are_cut_not_rounded():
    for k, found in enumerate(_mantissas().tolist()):
        power = 1 << ((23 + 40) * 128 + k)
        for _ in range(7):  # the root of degree 2**7, with 40 bits more than are kept
            power = math.isqrt(power)
        assert found == (power >> 40) / 2**23
        rest = power % 2**40
        # So far from where it is cut that a power in float64 is cut to the same.
        assert rest == k == 0 or 2**23 < rest < 2**40 - 2**23


@pytest.mark.parametrize("step", [0, 17, -1, 1.0, 0.5, True, "1", None])
def test_steps_that_cannot_be_used_are_errors(step):
    with pytest.raises(ConfigError, match="log-rank1, step: expected a whole number from 1 to 16"):
        LogRank1(step)
