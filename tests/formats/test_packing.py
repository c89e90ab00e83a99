"""Packing into int32 words: literal words, so that no later version can read them differently."""

from __future__ import annotations

import doctest
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_trainweights.errors import QuantizationError
from hf_trainweights.formats import FORMATS
from hf_trainweights.formats.packing import pack_int4, unpack_int4

DOCUMENTATION = Path(__file__).parents[2] / "docs"

# What compressed-tensors 0.20.0 writes for the same codes (`pack_to_int32(codes, num_bits=4)`).
WORDS = {
    (-8, -7, -6, -5, -4, -3, -2, -1): 0x76543210,
    (0, 1, 2, 3, 4, 5, 6, 7): 0xFEDCBA98,
    (0, 0, 0, 0, 0, 0, 0, 0): 0x88888888,
    (7, 7, 7, 7, 7, 7, 7, 7): 0xFFFFFFFF,
    (-8, -8, -8, -8, -8, -8, -8, -8): 0x00000000,
    (1, 0, 0, 0, 0, 0, 0, 0): 0x88888889,
    (0, 0, 0, 0, 0, 0, 0, -1): 0x78888888,
    (3, -1, -8, 7, 0, 2, -5, 6): 0xE3A8F07B,
}


@pytest.mark.parametrize(("codes", "word"), WORDS.items(), ids=lambda value: str(value).replace(" ", ""))
def test_words_are_those_of_compressed_tensors(codes: tuple[int, ...], word: int) -> None:
    packed = pack_int4(torch.tensor([codes]))
    assert packed.dtype == torch.int32
    assert [each & 0xFFFFFFFF for each in packed.flatten().tolist()] == [word]
    assert unpack_int4(packed).tolist() == [list(codes)]


def test_words_follow_the_columns_and_lie_least_significant_byte_first() -> None:
    packed = pack_int4(torch.tensor([[*range(-8, 8)]]))
    assert bytes(packed.view(torch.uint8).flatten().tolist()) == bytes.fromhex("10325476 98badcfe")


@pytest.mark.slow
@given(st.lists(st.lists(st.integers(-8, 7), min_size=24, max_size=24), max_size=5))
@settings(deadline=None, derandomize=True, database=None, max_examples=50)
def test_unpack_is_the_inverse_of_pack(rows: list[list[int]]) -> None:
    codes = torch.tensor(rows, dtype=torch.int8).reshape(-1, 24)
    for dtype in (torch.int8, torch.int64, torch.float32):
        packed = pack_int4(codes.to(dtype))
        assert packed.shape == (len(rows), 3)
        assert torch.equal(unpack_int4(packed), codes)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=8))
@settings(deadline=None, derandomize=True, database=None, max_examples=50)
def test_every_word_unpacks_to_codes_that_pack_to_it(words: list[int]) -> None:
    packed = torch.tensor(words, dtype=torch.int32).reshape(1, -1)
    assert torch.equal(pack_int4(unpack_int4(packed)), packed)


def test_leading_dimensions_and_strides_do_not_matter() -> None:
    codes = (torch.arange(2 * 3 * 16) * 7 % 16 - 8).to(torch.int8).view(2, 3, 16)
    packed = pack_int4(codes)
    assert torch.equal(packed[1, 2], pack_int4(codes[1, 2]))
    assert torch.equal(pack_int4(codes.transpose(1, 2).contiguous().transpose(1, 2)), packed)
    assert torch.equal(unpack_int4(packed.transpose(0, 1)), codes.transpose(0, 1))
    assert pack_int4(torch.zeros(8, 1).t()).tolist() == [[-0x77777778]]


def test_no_columns_pack_to_no_words() -> None:
    assert unpack_int4(pack_int4(torch.zeros(3, 0, dtype=torch.int8))).shape == (3, 0)


@pytest.mark.parametrize("columns", [1, 7, 12])
def test_columns_that_fill_no_word_are_refused(columns: int) -> None:
    with pytest.raises(QuantizationError, match=f"codes: expected a multiple of 8 columns to pack, found {columns}"):
        pack_int4(torch.zeros(2, columns))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
def test_words_of_another_dtype_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(QuantizationError, match=f"qdata: expected packed torch.int32 words, found {dtype}"):
        unpack_int4(torch.zeros(2, 2, dtype=dtype))


@pytest.mark.parametrize("page", ["format.md", "adding_a_format.md"])
def test_the_examples_in_the_documentation_hold(page: str) -> None:
    with patch.dict(FORMATS):
        failed, attempted = doctest.testfile(str(DOCUMENTATION / page), module_relative=False)
    assert attempted > 0
    assert failed == 0
