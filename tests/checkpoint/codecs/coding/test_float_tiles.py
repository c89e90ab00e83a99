import numpy as np
import pytest
import torch
from checkpoint.codecs.cases import bits_equal

from hf_trainweights.checkpoint.codecs.base import LOSSY_DTYPES
from hf_trainweights.checkpoint.codecs.coding.float_tiles import (
    moved_from,
    round_to_,
    split_misfits,
    to_float32,
    zeros_in,
)


def test_misfits_are_where_errors_are_too_large_or_nan():
    errors = np.array([[0.1, 0.5, np.nan], [-0.4, -np.inf, 0.0]], np.float32)
    positions, worst = split_misfits(errors, 0.45)
    assert positions is not None
    assert positions.tolist() == [1, 2, 4]
    assert worst == pytest.approx(0.4)
    assert split_misfits(errors[:, :1], 0.45) == (None, pytest.approx(0.4))
    assert split_misfits(np.full(3, np.nan, np.float32), 0.45)[1] == 0.0


def test_zeros_are_found_and_multiplied_away():
    assert zeros_in(np.array([1.0, -1e-45, np.nan], np.float32)) is None
    zeros = zeros_in(np.array([[0.0, -0.0, 3.0, np.inf]], np.float32))
    assert zeros is not None
    assert moved_from(zeros).tolist() == [[0.0, 0.0, 1.0, 1.0]]


@pytest.mark.parametrize("dtype", sorted(LOSSY_DTYPES, key=str), ids=str)
def test_float32_is_worked_on_where_it_lies_and_other_dtypes_in_scratch(dtype):
    tile = torch.tensor([[1 / 3, -0.0, torch.inf]]).to(dtype)
    values = to_float32(tile, "x")
    assert bits_equal(torch.from_numpy(values), tile.to(torch.float32))
    assert (values.ctypes.data == tile.data_ptr()) == (dtype == torch.float32)


@pytest.mark.parametrize("dtype", sorted(LOSSY_DTYPES, key=str), ids=str)
def test_values_are_rounded_once_to_the_dtype(dtype):
    values = np.array([1 / 3, 1e-9, 70000.0, np.nan], np.float32)
    expected = torch.from_numpy(values.copy()).to(dtype).to(torch.float32)
    round_to_(values, dtype)
    np.testing.assert_array_equal(values, expected.numpy())
