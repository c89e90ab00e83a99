"""Every entry of FORMATS keeps the contract of `hf_trainweights.testing`, and a few promises of this package's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import format_reference
import numpy as np
import pytest
import torch
from covering import by_default
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor
from weights import QUANTIZABLE

from hf_trainweights.errors import ConfigError
from hf_trainweights.formats import FORMATS, arithmetic, compiled_search, get_format
from hf_trainweights.formats.affine import Affine
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.uint import UInt
from hf_trainweights.testing import FormatContract
from hf_trainweights.testing.format_values import KINDS
from hf_trainweights.testing.formats import uneven_weight
from hf_trainweights.testing.values import assert_same, weight_with_outliers

property_test = settings(deadline=None, derandomize=True, database=None, max_examples=20)

# Formats whose codes calibration leaves as they are: those of 8 bits gain nothing.
WITHOUT_COLUMNS = ("int8", "float8_e4m3")


def variants() -> Iterator[Format]:
    """Yield each format with its defaults, and with every usual group size and number of bits that it takes."""
    choices = [{"group_size": group_size} for group_size in (32, 64, 128)] + [{"bits": bits} for bits in (2.5, 8)]
    choices.append({"bits": 3, "group_size": 64})
    for name in QUANTIZABLE:
        yield get_format({"format": name})
        for chosen in choices:
            with contextlib.suppress(ConfigError):
                form = get_format({"format": name, **chosen})
                if form != get_format({"format": name}):
                    yield form


VARIANTS = list(variants())
BY_DEFAULT = [get_format({"format": name}) for name in QUANTIZABLE]
CHOOSING_COLUMNS = [form for form in BY_DEFAULT if form.name not in WITHOUT_COLUMNS]
CHOOSING_COLUMNS += [get_format({"format": name, "group_size": 32}) for name in ("uint3", "int4")]
COLUMN_SCALED = [
    get_format({"format": name, "column_scale": True}) for name in QUANTIZABLE if name not in WITHOUT_COLUMNS
]
GOLDEN_ALONE = get_format({"format": "int4", "group_size": 32, "column_scale": True})
# What asks little of a processor, so that each change runs it.
QUICK = ("unknown", "survives", "registered", "empty", "without_it", "neither", "changes_no", "refused_by_name")


@pytest.mark.covering(1)
class TestEveryFormat(FormatContract):
    """The contract, with more weights than a third party needs to try."""

    golden = Path(__file__).parent / "golden"

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "subject" in metafunc.fixturenames:
            metafunc.parametrize("subject", parameters(metafunc.function.__name__), ids=str)

    def bound_of(self, subject: Format) -> float:
        if isinstance(subject, Affine) and subject.bits < 4:
            return 0.5
        return {"uint2": 0.75, "uint3": 0.4}.get(subject.name, 0.25)

    def vanishing(self, subject: Format, dtype: torch.dtype) -> float:
        # Whole steps of the smallest scale lie apart, and those of float16 are not that small.
        return arithmetic.SMALLEST_SCALE[dtype] * subject.grid.code_units if isinstance(subject, UInt) else 2.0**-126

    def reference(self, subject: Format, weight: Tensor) -> dict[str, Tensor]:
        return format_reference.quantize(subject, weight)

    @pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
    @pytest.mark.parametrize("kind", KINDS)
    def test_each_bit_of_a_weight_of_two_cache_blocks_is_that_of_the_reference(
        self, subject: Format, dtype: torch.dtype, kind: str
    ) -> None:
        self.assert_as_reference(subject, dtype, [(kind, (130, 1024))])

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
    def test_each_bit_of_a_weight_of_two_blocks_is_that_of_the_reference(
        self, subject: Format, dtype: torch.dtype
    ) -> None:
        self.assert_as_reference(subject, dtype, [("usual", (1100, 2048))])

    def test_the_default_dtype_changes_nothing_without_a_compiled_search(
        self, subject: Format, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compiled_search, "_load", lambda: None)
        self.test_the_default_dtype_changes_nothing(subject, torch.bfloat16)


def parameters(name: str) -> list[Any]:
    """Return the formats that a test of the contract runs on."""
    marks = [] if any(word in name for word in QUICK) else [pytest.mark.slow]
    if "matter" in name and "columns" in name:
        formats = CHOOSING_COLUMNS
    elif "were_chosen" in name:
        formats = [*CHOOSING_COLUMNS, *COLUMN_SCALED]
    else:
        formats = BY_DEFAULT if "default_dtype" in name else [*VARIANTS, GOLDEN_ALONE] if "golden" in name else VARIANTS
    return [pytest.param(form, marks=marks) for form in formats]


@pytest.mark.slow
@pytest.mark.parametrize("form", by_default(BY_DEFAULT, VARIANTS), ids=str)
@property_test
@given(data=st.data())
def test_any_finite_weight_comes_back_finite_and_near(form: Format, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(FLOAT_DTYPES))
    shape = data.draw(st.tuples(st.integers(1, 4), st.sampled_from([1, 5, 32, 128])))
    largest = torch.finfo(dtype).max
    floats = st.floats(-largest, largest, width=16 if dtype is torch.float16 else 32)
    weight = torch.from_numpy(data.draw(arrays(np.float32, shape, elements=floats))).to(dtype)
    TestEveryFormat().assert_near(form, weight.clamp(-largest, largest), shape)


@pytest.mark.slow
@pytest.mark.parametrize("form", by_default(BY_DEFAULT, VARIANTS), ids=str)
@property_test
@given(
    values=arrays(np.float32, (2, 128), elements=st.integers(-1000, 1000)),
    exponent=st.integers(-30, 30),
)
def test_a_power_of_two_goes_into_the_scale_alone(form: Format, values: np.ndarray, exponent: int) -> None:
    weight = torch.from_numpy(values)
    tensors, larger = form.quantize(weight), form.quantize(weight * 2.0**exponent)
    assert_same(larger, tensors | {"scale": tensors["scale"] * 2.0**exponent})


def test_no_two_formats_look_the_same() -> None:
    assert len({str(form) for form in VARIANTS}) == len(set(VARIANTS)) == len(VARIANTS)


@pytest.mark.parametrize(
    "config",
    [{}, {"format": None}, {"format": "int3"}, {"format": ["int4"]}, {"format": "INT8"}, {"format": 8}],
    ids=str,
)
def test_an_unknown_format_is_refused_with_the_known_ones(config: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"format: expected one of {', '.join(FORMATS)}, found"):
        get_format(config)


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_each_format_can_be_exported_and_all_but_those_of_eight_bits_gain_by_calibration(name: str) -> None:
    for column_scale in (False, True):
        form = get_format({"format": name, "column_scale": column_scale})
        unpacked = form.unpack(form.quantize(weight_with_outliers(6, 256)))
        assert unpacked is not None, "write `unpack`: each format of this package is exported as a graph"
        gains = form.columns(uneven_weight(torch.float32), torch.ones(256)) is not None
        assert gains is (name not in WITHOUT_COLUMNS), "write `columns`, or add the name to WITHOUT_COLUMNS"
