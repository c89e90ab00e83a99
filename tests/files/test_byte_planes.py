"""Words of floats and their planes: what is folded and split comes back bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_trainweights.files.byte_planes import fold, join_planes, split_planes, words_of

DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.int16, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_comes_back_from_planes(dtype: torch.dtype) -> None:
    every_byte = torch.arange(256, dtype=torch.uint8).repeat(2)
    words = words_of(every_byte.view(dtype))
    folded = fold(words, dtype)
    planes = np.empty((words.itemsize, len(words)), np.uint8)
    split_planes(folded.view(f"u{words.itemsize}"), planes)
    joined = np.empty_like(words)
    join_planes(list(planes), joined, dtype)
    np.testing.assert_array_equal(joined, words)


def test_the_exponent_of_a_folded_word_fills_its_highest_byte() -> None:
    folded = fold(words_of(torch.tensor([1.0, -1.5, 2.0])), torch.float32)
    assert folded.view(np.uint32).tolist() == [127 << 24, (127 << 24) + (1 << 23) + 1, 128 << 24]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.int32], ids=str)
def test_integers_and_floats_of_one_byte_are_not_folded(dtype: torch.dtype) -> None:
    words = words_of(torch.arange(256, dtype=torch.uint8).view(dtype))
    np.testing.assert_array_equal(fold(words, dtype), words)
