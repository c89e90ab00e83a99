"""Planes: codes of 2 to 6 bits in words, every code in its place and back."""

from __future__ import annotations

import format_reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_trainweights.errors import QuantizationError
from hf_trainweights.formats.planes import pack_planes, unpack_planes

each_width = pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])


def random_codes(*shape: int, bits: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@each_width
def test_codes_come_back(bits: int) -> None:
    for shape in ((32,), (3, 64), (2, 3, 96), (0, 32), (4, 0)):
        codes = random_codes(*shape, bits=bits)
        packed = pack_planes(codes, bits)
        assert (packed.dtype, packed.shape) == (torch.int32, (*shape[:-1], shape[-1] // 32 * bits))
        assert torch.equal(unpack_planes(packed, bits), codes)


@pytest.mark.slow
@each_width
@settings(deadline=None, derandomize=True, database=None, max_examples=20)
@given(seed=st.integers(0, 2**31))
def test_words_are_those_of_the_specification(bits: int, seed: int) -> None:
    codes = random_codes(5, 128, bits=bits, seed=seed)
    assert torch.equal(pack_planes(codes, bits), format_reference.pack_planes(codes.to(torch.int64), bits))


@pytest.mark.slow
@each_width
def test_each_bit_of_a_group_belongs_to_one_column(bits: int) -> None:
    found = set()
    for place in range(32 * bits):
        words = torch.zeros(bits, dtype=torch.int64)
        words[place // 32] = 1 << place % 32
        codes = unpack_planes(words.to(torch.int32), bits)
        column = int(codes.nonzero().item())
        found.add((column, int(codes[column])))
    assert found == {(column, 1 << bit) for column in range(32) for bit in range(bits)}


@each_width
def test_slices_of_rows_are_unpacked_as_they_lie(bits: int) -> None:
    codes = random_codes(6, 64, bits=bits)
    assert torch.equal(unpack_planes(pack_planes(codes, bits)[::2], bits), codes[::2])


def test_columns_that_fill_no_group_are_refused() -> None:
    with pytest.raises(QuantizationError, match="codes: expected a multiple of 32 columns to pack, found 40"):
        pack_planes(torch.zeros(2, 40, dtype=torch.uint8), 3)
