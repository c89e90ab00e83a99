"""int8: the arithmetic of its specification, one step after the other, and its group sizes."""

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
from hf_trainweights.formats.int8 import Int8


def reference(weight: Tensor, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and scales as `docs/format.md` prescribes them, group after group."""
    values = weight.float().numpy()
    rows, columns = values.shape
    codes = np.zeros((rows, columns), np.int8)
    scales = np.zeros((rows, columns // group_size), np.float32)
    for row in range(rows):
        for group in range(columns // group_size):
            place = slice(group * group_size, (group + 1) * group_size)
            amax = np.abs(values[row, place]).max()
            scale = stored_scale(amax, 127, torch.finfo(weight.dtype).max / 128, weight.dtype)
            scales[row, group] = scale
            if scale != 0:
                inverse = np.float32(1) / np.float32(scale)
                codes[row, place] = np.clip(np.rint(values[row, place] * inverse), -128, 127)
    return codes, scales


def assert_as_specified(weight: Tensor, form: Int8) -> None:
    tensors = form.quantize(weight)
    codes, scales = reference(weight, form.group_size or weight.shape[-1])
    assert tensors["scale"].float().tolist() == scales.tolist()
    assert tensors["qdata"].tolist() == codes.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("group_size", [None, 1, 6, 48])
def test_codes_and_scales_are_those_of_the_specification(dtype: torch.dtype, group_size: int | None) -> None:
    for exponent in (-140, -128, -22, -15, -7, 0, 6):
        weight = torch.randn(7, 48, generator=torch.Generator().manual_seed(exponent)) * 2.0**exponent
        assert_as_specified(weight.to(dtype), Int8(group_size))


@pytest.mark.slow
@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(
    values=arrays(np.float32, (3, 12), elements=st.floats(-60000, 60000, width=16)),
    dtype=st.sampled_from(FLOAT_DTYPES),
    group_size=st.sampled_from([None, 4]),
)
def test_any_weight_is_coded_as_specified(values: np.ndarray, dtype: torch.dtype, group_size: int | None) -> None:
    assert_as_specified(torch.from_numpy(values).to(dtype), Int8(group_size))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_every_error_is_at_most_half_a_step(dtype: torch.dtype) -> None:
    for exponent in range(-24, 9, 4):
        weight = (torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * 2.0**exponent).to(dtype)
        for form in (Int8(), Int8(16)):
            tensors = form.quantize(weight)
            exact = tensors["qdata"].double().view(32, tensors["scale"].shape[-1], -1)
            step = tensors["scale"].double().unsqueeze(-1)
            error = (exact * step).view(32, 64) - weight.double()
            # 127 codes of float32 rounding, at most 2**-23 of the value each way.
            assert ((error.abs() / step.expand_as(exact).reshape(32, 64).clamp_min(1e-300)) <= 0.5 + 2.0**-15).all()


def test_at_the_end_of_the_dtype_the_largest_value_is_a_step_short() -> None:
    weight = torch.tensor([[65504.0, -65504.0, 1.0, 0.0]], dtype=torch.float16)
    tensors = Int8().quantize(weight)
    assert tensors["scale"].tolist() == [[511.75]]
    assert tensors["qdata"].tolist() == [[127, -128, 0, 0]]


def test_a_scale_is_rounded_before_the_codes_are_chosen() -> None:
    # 1 / 127 is 0.00787401..., in bfloat16 0.00787353...: with the exact scale the second code would be 63.
    weight = torch.tensor([[1.0, 0.5]], dtype=torch.bfloat16)
    tensors = Int8().quantize(weight)
    assert tensors["scale"].item() == 129 * 2.0**-14
    assert tensors["qdata"].tolist() == [[127, 64]]


def test_groups_are_more_exact_than_rows() -> None:
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    weight[:, 0] *= 20
    snr = {}
    for group_size in (None, 128, 32):
        form = Int8(group_size)
        snr[group_size] = snr_db(weight, form.dequantize(form.quantize(weight), weight.shape, weight.dtype))
    assert snr[None] + 2 < snr[128] < snr[32]


@pytest.mark.parametrize(("shape", "fits"), [((4, 96), True), ((4, 100), False), ((4, 0), False), ((1, 32), True)])
def test_rows_share_one_scale_where_groups_do_not_divide_them(shape: tuple[int, int], fits: bool) -> None:
    assert Int8(32).fallback(shape) == (Int8(32) if fits else Int8())
    assert Int8().fallback(shape) == Int8()


@pytest.mark.parametrize("group_size", [0, -32, 1.5, "32", True])
def test_a_bad_group_size_is_refused(group_size: object) -> None:
    with pytest.raises(ConfigError, match="group_size: expected a positive integer or None for int8, found"):
        get_format({"format": "int8", "group_size": group_size})
