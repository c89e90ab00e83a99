"""Column scales: what they gain, how they are chosen, and that they are rounded as docs/format.md says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from weights import QUANTIZABLE

from hf_trainweights.errors import ConfigError, CorruptFileError, QuantizationError
from hf_trainweights.formats import get_format
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.column_scale import ColumnScaled, choose_column_scale
from hf_trainweights.testing.values import stored_bits

each_format = pytest.mark.parametrize("name", QUANTIZABLE)
each_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)


def column_scaled(name: str) -> Format:
    return get_format({"format": name, "column_scale": True})


def uneven_weight(N: int = 96, K: int = 256, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a weight whose input columns, and whose rows, are of very different size."""
    generator = torch.Generator().manual_seed(0)
    columns, rows = torch.randn(K, generator=generator).exp(), torch.randn(N, 1, generator=generator).exp()
    return (torch.randn(N, K, generator=generator) * columns * rows / 16).to(dtype)


# Formats whose codes are floats, which are as fine for small weights as for large ones.
WITHOUT_GAIN = ("float8_e4m3",)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in QUANTIZABLE if name not in WITHOUT_GAIN])
def test_columns_of_different_size_lose_less(name: str) -> None:
    weight, plain, scaled = uneven_weight(), get_format({"format": name}), column_scaled(name)
    errors = [
        # As an input sees it whose features are the larger the smaller their columns are: each column counts alike.
        ((form.dequantize(form.quantize(weight), weight.shape, torch.float32) - weight) / weight.std(0)).norm()
        for form in (plain, scaled)
    ]
    assert errors[1] < 0.8 * errors[0], f"column scales gain {name} nothing: if its codes are floats, list it above"


@each_dtype
def test_factors_are_the_spread_of_the_columns(dtype: torch.dtype) -> None:
    weight = uneven_weight(N=512, dtype=dtype)
    factors = choose_column_scale(weight)
    assert (factors.dtype, factors.shape) == (dtype, (1, 256))
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(256, generator=generator).exp()
    wanted = wanted.clamp_min(wanted.max() / 64)
    ratio = factors[0].float() / wanted
    assert ratio.std() / ratio.mean() < 0.1


@each_dtype
def test_the_largest_factor_is_at_most_one_and_the_smallest_a_64th_of_it(dtype: torch.dtype) -> None:
    weight = uneven_weight().mul(torch.logspace(-6, 0, 256)).to(dtype)
    factors = choose_column_scale(weight).float()
    assert 0.5 <= factors.max() <= 1
    assert factors.min() >= 0.99 * factors.max() / 64


@pytest.mark.parametrize("value", [0.0, 0.25])
def test_columns_without_spread_keep_a_usual_factor_and_their_values(value: float) -> None:
    weight = uneven_weight()
    weight[:, 7] = value
    form = column_scaled("int8")
    stored = form.quantize(weight)
    factors = stored["column_scale"][0]
    assert factors.min() <= factors[7] <= factors.max()
    assert torch.isfinite(factors).all()
    values = form.dequantize(stored, weight.shape, torch.float32)[:, 7]
    assert (values - value).abs().max() <= weight.abs().max() / 100


@pytest.mark.slow
@each_format
def test_dequantize_rounds_to_float32_and_then_to_the_dtype(name: str) -> None:
    for dtype in FLOAT_DTYPES:
        form, weight = column_scaled(name), uneven_weight(dtype=dtype)
        stored = form.quantize(weight)
        assert isinstance(form, ColumnScaled)
        for to in (*FLOAT_DTYPES, torch.float64):
            exact = torch.float64 if to == torch.float64 else torch.float32
            inner = form.inner.dequantize(stored, weight.shape, exact)
            assert stored_bits(form.dequantize(stored, weight.shape, to)) == stored_bits(
                (inner * stored["column_scale"].to(exact)).to(to)
            )


@pytest.mark.slow
@each_format
def test_experts_have_factors_of_their_own(name: str) -> None:
    form, experts = column_scaled(name), torch.stack([uneven_weight(), uneven_weight().flip(-1)])
    together = form.quantize(experts)
    for index, expert in enumerate(experts):
        for key, tensor in form.quantize(expert).items():
            assert stored_bits(together[key][index]) == stored_bits(tensor)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_weight_that_is_not_finite_is_refused(value: float) -> None:
    weight = uneven_weight()
    weight[5, 6] = value
    with pytest.raises(QuantizationError, match="NaN or Inf in rows 0 to 95"):
        column_scaled("int4").quantize(weight)


@pytest.mark.slow
@each_dtype
def test_the_largest_numbers_come_back_finite(dtype: torch.dtype) -> None:
    weight = (uneven_weight().sign() * torch.finfo(dtype).max * torch.logspace(-3, 0, 256)).to(dtype)
    for name in QUANTIZABLE:
        form = column_scaled(name)
        assert torch.isfinite(form.dequantize(form.quantize(weight), weight.shape, dtype)).all()


def test_a_weight_of_one_row_has_no_column_scales() -> None:
    assert column_scaled("int8").fallback((1, 64)) == get_format({"format": "int8"})
    assert column_scaled("int4").fallback((4, 48)) == column_scaled("int8")


def test_a_missing_column_scale_is_found() -> None:
    form, weight = column_scaled("int8"), uneven_weight()
    stored = form.quantize(weight)
    del stored["column_scale"]
    with pytest.raises(CorruptFileError, match=r"column_scale to be torch.float32 of shape \(1, 256\)"):
        form.dequantize(stored, weight.shape, torch.float32)


def test_the_parameter_is_a_bool_and_named_only_where_it_is_set() -> None:
    with pytest.raises(ConfigError, match="column_scale: expected True or False"):
        get_format({"format": "int4", "column_scale": 1})
    assert get_format({"format": "int4", "column_scale": False}) == get_format({"format": "int4"})
    form = column_scaled("int4")
    assert form.get_config() == {"format": "int4", "group_size": 128, "column_scale": True}
    assert get_format(form.get_config()) == form
    assert str(form) == "int4 g128 with column scales"
