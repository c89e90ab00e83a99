import numpy as np
import pytest

from hf_trainweights.checkpoint.codecs.float_tiles import moved_from, split_misfits, zeros_in


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
