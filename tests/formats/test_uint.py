"""uint2 to uint6: what their grids hold exactly, what the search gains, and which shapes they take."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import snr_db
from torch import Tensor

from hf_trainweights.errors import ConfigError
from hf_trainweights.formats import get_format
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.planes import unpack_planes
from hf_trainweights.formats.uint import UInt, UInt2, UInt3, UInt4, UInt5, UInt6

WIDTHS: tuple[type[UInt], ...] = (UInt2, UInt3, UInt4, UInt5, UInt6)
FORMS = [form(group_size) for form in WIDTHS for group_size in (16, 32)]
each_form = pytest.mark.parametrize("form", FORMS, ids=str)

# Normal weights, rows of 512: what was measured, less half a decibel.
LEAST_SNR_DB = {
    "uint2": (10.5, 9.2),
    "uint3": (16.6, 15.1),
    "uint4": (22.5, 21.0),
    "uint5": (28.4, 26.8),
    "uint6": (34.4, 32.8),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def after(form: Format, weight: Tensor) -> Tensor:
    return form.dequantize(form.quantize(weight), weight.shape, weight.dtype)


def pairs(values: Tensor) -> Tensor:
    return torch.stack((values & 15, values >> 4), dim=-1).flatten(-2).int()


@each_form
def test_the_stored_tensors_are_read_by_their_formula(form: UInt) -> None:
    stored = form.quantize(normal(6, 128))
    grid, codes = form.grid, unpack_planes(stored["qdata"], form.grid.bits).double().view(6, -1, form.group_size)
    zeros, scales = pairs(stored["zero_point"]).unsqueeze(-1), pairs(stored["group_scale"]).unsqueeze(-1) + 1
    wanted = (codes * grid.code_units - zeros * grid.zero_units) * scales * stored["scale"].double().unsqueeze(-1)
    assert torch.equal(form.dequantize(stored, (6, 128), torch.float64), wanted.view(6, 128))


@each_form
def test_zero_points_spread_over_all_codes(form: UInt) -> None:
    grid = form.grid
    assert 14 * grid.zero_units <= grid.largest_code * grid.code_units < 16 * grid.zero_units
    # As bytes they are computed without overflow.
    assert grid.largest_code * grid.code_units < 128


@each_form
def test_a_row_scale_is_one_or_one_and_a_half_times_a_power_of_two(form: UInt) -> None:
    for dtype in FLOAT_DTYPES:
        rows = (normal(64, 128) * torch.logspace(-5, 3, 64).unsqueeze(1)).to(dtype)
        fractions = torch.frexp(form.quantize(rows)["scale"].float()).mantissa
        assert set(fractions.flatten().tolist()) == {0.5, 0.75}


@each_form
def test_values_of_the_grid_come_back_exactly(form: UInt) -> None:
    for dtype in FLOAT_DTYPES:
        grid, generator = form.grid, torch.Generator().manual_seed(0)
        codes = torch.randint(0, grid.largest_code + 1, (6, 4, form.group_size), generator=generator)
        # Each group has both ends of its range, and every row a group of the largest scale.
        codes[..., 0], codes[..., 1] = 0, grid.largest_code
        scales = torch.tensor([16, 8, 12, 4]).view(4, 1)
        middle = 8 * grid.code_units * grid.zero_units // grid.code_units
        weight = ((codes * grid.code_units - middle) * scales * 2.0**-9).flatten(1).to(dtype)
        assert torch.equal(after(form, weight), weight)


@each_form
def test_normal_weights_keep_what_was_measured(form: UInt) -> None:
    weight = normal(256, 512)
    assert snr_db(weight, after(form, weight)) > LEAST_SNR_DB[form.name][form.group_size // 32]


def test_more_bits_and_smaller_groups_are_more_exact() -> None:
    weight = normal(128, 512)
    snr = [snr_db(weight, after(form(group_size), weight)) for form in WIDTHS for group_size in (32, 16)]
    assert snr == sorted(snr)


@pytest.mark.parametrize(
    ("form", "least_gain"), [(UInt2(), 1.5), (UInt2(32), 2), (UInt3(), 0.3), (UInt3(32), 0.5)], ids=str
)
def test_the_search_gains_on_the_whole_range_of_each_group(form: UInt, least_gain: float) -> None:
    weight = normal(128, 512)
    groups = weight.view(-1, form.group_size)
    low, high = groups.amin(dim=1, keepdim=True), groups.amax(dim=1, keepdim=True)
    step = (high - low) / form.grid.largest_code
    # The ends of each range in float32, which take eight times the bits of a group scale and a zero point.
    whole_range = (((groups - low) / step).round() * step + low).view_as(weight)
    assert snr_db(weight, after(form, weight)) > snr_db(weight, whole_range) + least_gain


@each_form
def test_values_of_one_sign_are_no_worse_than_those_of_both(form: UInt) -> None:
    weight = normal(64, 256)
    both, one = (snr_db(each, after(form, each)) for each in (weight, weight.abs()))
    assert one > both + 3


def test_a_group_of_zeros_beside_others_stays_zero() -> None:
    for form in FORMS:
        weight = normal(4, 128)
        weight[1, 32:96] = 0
        assert not after(form, weight)[1, 32:96].any(), form


@pytest.mark.covering(1)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("shape", "group_size", "found"),
    [
        ((2, 64), 32, 32),
        ((2, 96), 32, 16),
        ((2, 32), 32, 16),
        ((2, 32), 16, 16),
        ((3, 2, 96), 16, 16),
        ((2, 48), 16, None),
        ((1, 64), 16, None),
        ((64, 1), 16, None),
        ((0, 64), 16, None),
        ((2, 0), 16, None),
    ],
    ids=str,
)
def test_shapes_fall_back_to_smaller_groups_and_then_to_int8(
    width: type[UInt], shape: tuple[int, ...], group_size: int, found: int | None
) -> None:
    assert width(group_size).fallback(shape) == (Int8() if found is None else width(found))


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["uint2", "uint4", "uint6"])
@pytest.mark.parametrize("group_size", [None, 0, 8, 24, 64, 16.0, "16", True])
def test_a_bad_group_size_is_refused_with_the_good_ones(name: str, group_size: object) -> None:
    with pytest.raises(ConfigError, match=f"group_size: expected one of 16, 32 for {name}, found"):
        get_format({"format": name, "group_size": group_size})


@pytest.mark.parametrize("width", WIDTHS)
def test_the_description_names_bits_and_groups(width: type[UInt]) -> None:
    assert str(width()) == f"uint{width.grid.bits} g16"
    assert json.dumps(width(32).get_config()) == f'{{"format": "{width.name}", "group_size": 32}}'


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("q4_k", "uint4"),
        ("Q4_K_M", "uint4"),
        ("hqq4", "uint4"),
        ("uint4_asym", "uint4"),
        ("q2_k", "uint2"),
        ("int2", "uint2"),
        ("iq3_xs", "uint3"),
        ("int3", "uint3"),
        ("q5_k", "uint5"),
        ("Q6_K", "uint6"),
        ("nf4", "int4"),
        ("q4_0", "int4"),
        ("q8_0", "int8"),
    ],
)
def test_names_of_other_libraries_lead_to_the_format_of_their_size(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f'Did you mean "{hint}"'):
        get_format({"format": name})
