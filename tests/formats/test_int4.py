"""int4: the arithmetic of its specification, the search for the scale, and the layout of its words."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import snr_db, stored_scale
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from hf_trainweights.errors import ConfigError
from hf_trainweights.formats import get_format
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.packing import unpack_int4

CLIPPINGS = (7.5, 8.0, 8.5, 9.0)


def code(group: np.ndarray, scale: float) -> np.ndarray:
    """Return the codes of a group as `docs/format.md` prescribes them."""
    if scale == 0:
        return np.zeros_like(group)
    return np.clip(np.rint(group * (np.float32(1) / np.float32(scale))), -8, 7)


def assert_as_specified(weight: Tensor, group_size: int) -> None:
    """Check codes against a scalar reference, and that no candidate scale would have been better."""
    tensors = Int4(group_size).quantize(weight)
    values = weight.float().view(-1, group_size).numpy()
    scales = tensors["scale"].float().flatten().tolist()
    codes = unpack_int4(tensors["qdata"]).view(-1, group_size).numpy()
    for group, scale, chosen in zip(values, scales, codes, strict=True):
        sign = 1 if -group.min() >= group.max() else -1
        largest = torch.finfo(weight.dtype).max / 8
        allowed = [sign * stored_scale(np.abs(group).max(), clipping, largest, weight.dtype) for clipping in CLIPPINGS]
        assert scale in allowed
        assert chosen.tolist() == code(group, scale).tolist()
        errors = [np.square(code(group, each).astype(float) * each - group).sum() for each in allowed]
        assert np.square(chosen * scale - group.astype(float)).sum() <= min(errors) * (1 + 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_codes_and_scales_are_those_of_the_specification(dtype: torch.dtype, group_size: int) -> None:
    for exponent in (-140, -22, -15, -7, 0, 6):
        weight = torch.randn(5, 256, generator=torch.Generator().manual_seed(exponent)) * 2.0**exponent
        assert_as_specified(weight.to(dtype), group_size)


@pytest.mark.slow
@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(
    values=arrays(np.float32, (2, 64), elements=st.floats(-60000, 60000, width=16)),
    dtype=st.sampled_from(FLOAT_DTYPES),
)
def test_any_weight_is_coded_as_specified(values: np.ndarray, dtype: torch.dtype) -> None:
    assert_as_specified(torch.from_numpy(values).to(dtype), 32)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_every_error_inside_the_range_is_at_most_half_a_step(dtype: torch.dtype) -> None:
    for exponent in range(-24, 9, 4):
        weight = (torch.randn(32, 128, generator=torch.Generator().manual_seed(0)) * 2.0**exponent).to(dtype)
        tensors = Int4(32).quantize(weight)
        steps = weight.double().view(32, 4, 32) / tensors["scale"].double().unsqueeze(-1)
        inside = steps.clamp(-8, 7)
        codes = unpack_int4(tensors["qdata"]).double().view(32, 4, 32)
        assert ((codes - inside).abs() <= 0.5 + 2.0**-15).all()
        # The most that is clipped: a largest magnitude on 9, on the side that ends at 7.
        assert ((steps - inside).abs() <= 2.05).all()


@pytest.mark.parametrize("tail", [1, -1])
def test_the_longer_tail_gets_the_code_of_minus_eight(tail: int) -> None:
    weight = torch.zeros(2, 32)
    weight[:, 0], weight[:, 1] = tail * 8.0, tail * -7.0
    tensors = Int4(32).quantize(weight)
    assert tensors["scale"].tolist() == [[-tail]] * 2
    assert unpack_int4(tensors["qdata"])[0, :3].tolist() == [-8, 7, 0]
    assert torch.equal(Int4(32).dequantize(tensors, weight.shape, weight.dtype), weight)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_codes_times_a_scale_come_back_exactly(dtype: torch.dtype) -> None:
    codes = torch.randint(-8, 8, (6, 256), generator=torch.Generator().manual_seed(0))
    codes[:, ::64] = -8
    weight = (codes.view(6, 4, 64) * torch.tensor([0.25, -3.0, 0.0078125, 1.5]).view(1, 4, 1)).view(6, 256).to(dtype)
    assert torch.equal(Int4(64).dequantize(Int4(64).quantize(weight), weight.shape, dtype), weight)


@pytest.mark.parametrize("magnitude", [1e-30, 1e25])
def test_where_squares_leave_the_range_the_scale_that_clips_least_is_taken(magnitude: float) -> None:
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(0)) * magnitude
    steps = weight.view(8, 4, 32) / Int4(32).quantize(weight)["scale"].unsqueeze(-1)
    assert torch.allclose(steps.amin(dim=-1), torch.tensor(-7.5))


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_the_search_gains_a_decibel_on_plain_absmax(group_size: int) -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    groups = weight.view(64, -1, group_size)
    scale = groups.abs().amax(dim=-1, keepdim=True) / 7
    absmax = ((groups / scale).round() * scale).view_as(weight)
    values = Int4(group_size).dequantize(Int4(group_size).quantize(weight), weight.shape, weight.dtype)
    assert snr_db(weight, values) > snr_db(weight, absmax) + 1


def test_smaller_groups_are_more_exact() -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    snr = [
        snr_db(weight, Int4(group_size).dequantize(Int4(group_size).quantize(weight), weight.shape, weight.dtype))
        for group_size in (128, 64, 32)
    ]
    assert snr == sorted(snr)


@pytest.mark.parametrize(
    ("shape", "fits"),
    [((2, 64), True), ((2, 96), False), ((2, 65), False), ((1, 64), False), ((64, 1), False), ((0, 64), False)],
    ids=str,
)
def test_shapes_that_groups_do_not_divide_fall_back_to_int8(shape: tuple[int, int], fits: bool) -> None:
    expected = Int4(64) if fits else Int8()
    assert Int4(64).fallback(shape) == expected
    assert Int4(64).fallback((3, *shape)) == expected


@pytest.mark.parametrize("group_size", [None, 0, 8, 16, 48, 256, 32.0, "32", True])
def test_a_bad_group_size_is_refused_with_the_good_ones(group_size: object) -> None:
    with pytest.raises(ConfigError, match="group_size: expected one of 32, 64, 128 for int4, found"):
        get_format({"format": "int4", "group_size": group_size})
