"""float8_e4m3: the arithmetic of its specification, one step after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import stored_scale
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from hf_trainweights.errors import ConfigError
from hf_trainweights.formats import arithmetic, get_format
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.testing.values import stored_bits

# Every finite e4m3 number: 7 steps of 2**-9, then 8 in each of 15 octaves, the last without its NaN.
MAGNITUDES = [step * 2.0**-9 for step in range(8)]
MAGNITUDES += [(8 + step) * 2.0 ** (octave - 10) for octave in range(1, 16) for step in range(8)]
CODES = np.array(MAGNITUDES[:-1])


def reference(weight: Tensor) -> tuple[np.ndarray, list[float]]:
    """Return decoded codes and scales as `docs/format.md` prescribes them, row after row."""
    values = weight.float().numpy()
    codes, scales = np.zeros(values.shape), []
    for row, numbers in enumerate(values):
        scales.append(stored_scale(np.abs(numbers).max(), 448, torch.finfo(weight.dtype).max / 512, weight.dtype))
        if scales[-1] != 0:
            wanted = numbers * (np.float32(1) / np.float32(scales[-1]))
            codes[row] = [np.copysign(nearest_even(abs(number)), number) for number in wanted.astype(np.float64)]
    return codes, scales


def nearest_even(magnitude: float) -> float:
    """Return the nearest e4m3 magnitude; of two, the one with an even place, which is the even mantissa."""
    distance = np.abs(CODES - min(magnitude, 448))
    places = np.flatnonzero(distance == distance.min())
    return CODES[next((place for place in places if place % 2 == 0), places[0])]


def assert_as_specified(weight: Tensor) -> None:
    tensors = Float8E4M3().quantize(weight)
    codes, scales = reference(weight)
    assert tensors["scale"].float().flatten().tolist() == scales
    assert tensors["qdata"].double().tolist() == codes.tolist()


def test_the_codes_are_those_of_the_dtype() -> None:
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert every.double().tolist() == CODES.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("exponent", [-140, -128, -22, -15, -7, 0, 6])
def test_codes_and_scales_are_those_of_the_specification(dtype: torch.dtype, exponent: int) -> None:
    weight = torch.randn(7, 48, generator=torch.Generator().manual_seed(exponent)) * 2.0**exponent
    assert_as_specified(weight.to(dtype))


@pytest.mark.slow
@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(
    values=arrays(np.float32, (3, 12), elements=st.floats(-60000, 60000, width=16)),
    dtype=st.sampled_from(FLOAT_DTYPES),
)
def test_any_weight_is_coded_as_specified(values: np.ndarray, dtype: torch.dtype) -> None:
    assert_as_specified(torch.from_numpy(values).to(dtype))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_every_error_is_at_most_half_a_step(dtype: torch.dtype) -> None:
    for exponent in range(-24, 9, 4):
        weight = (torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * 2.0**exponent).to(dtype)
        tensors = Float8E4M3().quantize(weight)
        scale, codes = tensors["scale"].double(), tensors["qdata"].double()
        # Steps are 2**-3 of the octave, 2**-9 below the smallest one.
        step = torch.exp2(torch.floor(torch.log2(codes.abs().clamp_min(2.0**-6))) - 3) * scale
        assert ((codes * scale - weight.double()).abs() <= step * (0.5 + 2.0**-15)).all()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_no_code_is_nan_where_the_rounded_scale_is_a_little_small(dtype: torch.dtype) -> None:
    weight = torch.linspace(1, 2, 4096).unsqueeze(1).to(dtype)
    tensors = Float8E4M3().quantize(weight)
    assert (tensors["qdata"].float() == 448).all()
    assert stored_bits(tensors["qdata"]) == [0x7E] * 4096


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.0, 2.0**-126, 1e-3, 0.75, 3.0, 7e5, 2.0**118], ids=str)
def test_every_code_is_dequantized_with_one_rounding(
    scale: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "CACHE_BLOCK_ELEMENTS", 512)
    half = torch.arange(127, dtype=torch.uint8)
    codes = torch.cat([half, half + 128]).view(torch.float8_e4m3fn)
    scales = torch.full((2, 3, 1), scale)
    result = Float8E4M3().dequantize_rows({"qdata": codes.expand(2, 3, -1), "scale": scales}, 254, dtype)
    # A scale of float32 makes a product of float32, which is then rounded to 16 bits.
    expected = (codes.float() * scale).to(dtype).expand(2, 3, -1)
    assert result.dtype == dtype
    assert torch.equal(result, expected)


def test_every_shape_fits() -> None:
    for shape in ((1, 1), (3, 7), (0, 5), (2, 3, 5)):
        assert Float8E4M3().fallback(shape) == Float8E4M3()


def test_parameters_that_are_not_set_are_not_written() -> None:
    # Earlier versions read the description of a format without parameters alone.
    assert get_format({"format": "float8_e4m3"}).get_config() == {"format": "float8_e4m3"}
    form = get_format({"format": "float8_e4m3", "group_size": 128})
    assert form.get_config() == {"format": "float8_e4m3", "group_size": 128}
    with pytest.raises(ConfigError, match="group_size: expected a multiple of 8 or None for float8_e4m3"):
        get_format({"format": "float8_e4m3", "group_size": 100})
