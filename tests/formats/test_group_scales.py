"""Scales of groups in 6 bits, and the packing of their codes."""

from __future__ import annotations

import pytest
import torch

from hf_trainweights.formats.group_scales import (
    FACTORS,
    SCALE_BITS,
    decode_group_scales,
    encode_group_scales,
    pack_bits,
    packed_bytes,
    unpack_bits,
)


def test_factors_are_eighths_of_an_octave_in_eight_bits() -> None:
    assert (len(FACTORS), FACTORS[0], FACTORS[-1]) == (64, 0.0, 1.0)
    for code, factor in enumerate(FACTORS[1:], 1):
        assert factor == pytest.approx(2 ** ((code - 63) / 8), rel=2**-8)
        assert torch.tensor(factor).bfloat16().item() == factor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_code_comes_back_and_its_scale_is_exact(dtype: torch.dtype) -> None:
    row_scale = torch.tensor([[0.0], [1.0], [3.14159]]).to(dtype)
    codes = torch.arange(64, dtype=torch.uint8).expand(3, 64).clone()
    codes[0] = 0
    scale = decode_group_scales(codes, row_scale)
    assert torch.equal(scale.double(), torch.tensor(FACTORS, dtype=torch.float64)[codes.long()] * row_scale.double())
    assert torch.equal(encode_group_scales(scale, row_scale), codes)


def test_a_scale_has_the_nearest_code_and_only_zero_has_code_zero() -> None:
    scale = torch.rand(64, 16, generator=torch.Generator().manual_seed(0)) ** 8
    scale[3, 4], scale[5] = 0.0, 2.0**-30
    row_scale = torch.ones(64, 1)
    codes = encode_group_scales(scale, row_scale)
    nearest = (scale.unsqueeze(-1) - torch.tensor(FACTORS[1:])).abs().amin(-1)
    error = (decode_group_scales(codes, row_scale) - scale).abs()
    assert torch.equal(codes == 0, scale == 0)
    assert torch.equal(error[scale > 0], nearest[scale > 0])


@pytest.mark.parametrize("bits", range(1, 8))
def test_packed_codes_come_back(bits: int) -> None:
    for shape in ((3, 12), (2, 3, 1), (1, 8), (5, 17), (0, 4), (4, 0)):
        codes = torch.randint(0, 1 << bits, shape, generator=torch.Generator().manual_seed(bits))
        packed = pack_bits(codes, bits)
        assert (packed.dtype, packed.shape[-1]) == (torch.uint8, packed_bytes(shape[-1], bits))
        assert torch.equal(unpack_bits(packed, bits, shape[-1]), codes)


def test_the_first_code_lies_in_the_lowest_bits() -> None:
    codes = [5, 0, 63, 17, 42]
    number = sum(code << SCALE_BITS * place for place, code in enumerate(codes))
    assert bytes(pack_bits(torch.tensor(codes), SCALE_BITS).tolist()) == number.to_bytes(4, "little")
