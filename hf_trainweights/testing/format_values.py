"""The values of a format: how near they are to the weight, and which arithmetic gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.testing.values import assert_same, round_once, stored_bits, weight_with_outliers

# Weights whose shape or numbers are hard for some arithmetic, made of normal values.
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "usual": lambda values: values,
    "zeros": lambda values: values * (values > 0.05),
    "negative zeros": lambda values: values * (values > 2),
    "one sign": lambda values: values.abs(),
    "other sign": lambda values: -values.abs(),
    "even tails": lambda values: values.sign(),  # both ends of a group are equally far from 0
    "smallest normal": lambda values: values * 2.0**-126,
    "denormal": lambda values: values * 2.0**-140,
    "small of float16": lambda values: values * 2.0**-18,
    "squares overflow": lambda values: values.clamp(-1, 1) * 2.0**100,
    "largest": lambda values: (values * 2.0**140).clamp(-3e38, 3e38),
}
_SMALL_SHAPES = [(1, 1), (1, 7), (257, 3), (3, 96), (2, 128)]


class FormatSubjects:
    """The formats that a contract is run on, and the facts about them that a subclass states."""

    formats: ClassVar[Sequence[Format]] = ()
    """The formats, with all parameters that a user will choose; each test runs on each."""

    golden: ClassVar[Path | None] = None
    """The directory of the golden files, which hold later versions to today's bytes; None if there is none yet."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test on each format."""
        if "subject" in metafunc.fixturenames:
            assert self.formats, f"{type(self).__name__}: list the formats to test in `formats`"
            metafunc.parametrize("subject", self.formats, ids=str)

    def bound_of(self, subject: Format) -> float:
        """Return the largest error that a value may have, as a fraction of its row's largest magnitude.

        The fewer codes a format has, the farther apart they lie, and the more of an outlier it may have to clip.
        """
        del subject
        return 0.25

    def vanishing(self, subject: Format, dtype: torch.dtype) -> float:
        """Return the magnitude below which values may become 0, because no scale is that small."""
        del subject, dtype
        return 2.0**-126

    def reference(self, subject: Format, weight: Tensor) -> dict[str, Tensor] | None:
        """Return the tensors that the format must store of a matrix, by arithmetic that was written a second time."""
        del subject, weight
        return None

    def largest_error(self, subject: Format, weight: Tensor) -> Tensor:
        """Return for each row the largest error as a fraction of the row's largest magnitude."""
        form = subject.fallback(weight.shape)
        values = form.dequantize(form.quantize(weight), weight.shape, torch.float32).double()
        amax = weight.double().abs().amax(dim=-1)
        errors = (values - weight.double()).abs().amax(dim=-1) - self.vanishing(form, weight.dtype)
        return errors.clamp_min(0) / amax.clamp_min(1e-300)

    def assert_near(self, subject: Format, weight: Tensor, case: object) -> None:
        """Check that no value is farther off than `bound_of` allows."""
        error, bound = self.largest_error(subject, weight).max().item(), self.bound_of(subject)
        advice = "If this is as it must be, for example because the format has few codes, override bound_of."
        assert error <= bound, f"{case}: a value is off by {error:.3f} of its row's largest magnitude. {advice}"


def values_of(form: Format, weight: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a weight quantized and dequantized."""
    return form.dequantize(form.quantize(weight), weight.shape, dtype)


class FormatValues(FormatSubjects):
    """The part of `FormatContract` about values."""

    def test_each_value_has_the_nearest_code(self, subject: Format) -> None:
        """No value of a group may lie nearer to a weight than the value that its own code stands for.

        `quantize_rows` must choose codes for the scale as it is stored (`round_scale` first), and round to nearest.
        """
        for dtype in FLOAT_DTYPES:
            weight = weight_with_outliers(6, 256, dtype=dtype)
            G = 256 // (getattr(subject, "group_size", None) or 256)
            wanted = weight.double().view(6, G, -1)
            values = values_of(subject, weight).double().view(6, G, -1)
            # All values a group decodes to are codes of its scale, so no other of them may be nearer.
            nearest = (wanted.unsqueeze(-1) - values.unsqueeze(-2)).abs().amin(dim=-1)
            tolerance = 1e-6 * wanted.abs().amax(dim=-1, keepdim=True)  # for a tie in float32
            assert ((values - wanted).abs() <= nearest + tolerance).all(), f"{dtype}: another code is nearer"

    def test_no_error_exceeds_a_part_of_the_rows_largest_magnitude(self, subject: Format) -> None:
        """The error is in proportion to the weight, from the smallest numbers of float16 to large ones."""
        for dtype in FLOAT_DTYPES:
            for exponent in (-24, -20, -17, -14, -8, 0, 8):
                weight = (weight_with_outliers(16, 256) * 2.0**exponent).to(dtype)
                self.assert_near(subject, weight, f"{dtype}, 2**{exponent}")

    def test_rows_of_zeros_come_back_as_zeros_and_leave_the_others_alone(self, subject: Format) -> None:
        """A row of zeros has the scale 0, for which `reciprocal` returns 0 instead of infinity."""
        weight = weight_with_outliers(6, 256)
        weight[1], weight[4] = 0.0, -0.0
        values, others = values_of(subject, weight), [0, 2, 3, 5]
        assert not values[[1, 4]].any(), "a row of zeros is not zero"
        if subject.has_independent_rows:
            assert torch.equal(values[others], values_of(subject, weight[others])), "a row of zeros changes other rows"

    def test_the_largest_and_smallest_numbers_come_back_finite(self, subject: Format) -> None:
        """Pass the largest code to `round_scale`: it keeps that code times the scale finite."""
        for dtype in FLOAT_DTYPES:
            numbers = torch.finfo(dtype)
            smallest = torch.tensor(numbers.tiny * numbers.eps, dtype=dtype)
            weight = torch.zeros(8, 256, dtype=dtype)
            weight[0, ::2], weight[0, 1::2] = numbers.max, numbers.min
            weight[1, 0], weight[1, 1:] = numbers.max, smallest
            weight[2, 3] = numbers.min
            weight[3], weight[4], weight[5, 7] = numbers.tiny, smallest, -smallest
            weight[6] = torch.linspace(-1, 1, 256).mul(numbers.max)
            weight[7] = torch.linspace(-1, 1, 256).mul(numbers.tiny)
            tensors = subject.quantize(weight)
            for name, tensor in tensors.items():
                assert torch.isfinite(tensor.float()).all(), f"{dtype}: {name} holds NaN or Inf"
            assert torch.isfinite(subject.dequantize(tensors, weight.shape, dtype)).all(), dtype
            self.assert_near(subject, weight, dtype)

    def test_dequantize_rounds_the_exact_product_once(self, subject: Format) -> None:
        """`dequantize_rows` returns code times scale as `scale_codes` does: computed exactly, rounded to the dtype."""
        for dtype in FLOAT_DTYPES:
            weight = weight_with_outliers(64, 512, dtype=dtype)
            tensors = subject.quantize(weight)
            G = tensors["scale"].shape[-1]
            ones = tensors | {"scale": torch.ones_like(tensors["scale"])}
            unit = subject.dequantize(ones, weight.shape, torch.float32)
            product = unit.double().view(64, G, -1) * tensors["scale"].double().unsqueeze(-1)
            for to in (*FLOAT_DTYPES, torch.float64):
                # A float32 scale times a code may need more than 24 bits. On the way to 16 bits such a product is
                # rounded to float32 first.
                twice = dtype is torch.float32 and to in (torch.bfloat16, torch.float16)
                exact = round_once(product, torch.float32) if twice else product
                values = subject.dequantize(tensors, weight.shape, to)
                assert values.dtype == to, "dequantize_rows must return the dtype that it gets"
                rounded = round_once(exact.view(64, 512), to)
                assert stored_bits(values.abs()) == stored_bits(rounded.abs()), f"scales of {dtype}, values of {to}"

    @pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
    def test_each_bit_is_that_of_the_arithmetic_written_a_second_time(
        self, subject: Format, dtype: torch.dtype
    ) -> None:
        """A second, plain implementation proves the fast one; `reference` returns its tensors."""
        cases = [("usual", shape) for shape in _SMALL_SHAPES]
        cases += [(kind, shape) for kind in KINDS for shape in ((5, 33), (9, 512))]
        self.assert_as_reference(subject, dtype, cases)

    def assert_as_reference(self, subject: Format, dtype: torch.dtype, cases: Sequence[tuple[str, Any]]) -> None:
        """Compare the stored tensors of weights of some kinds and shapes with those of `reference`."""
        for kind, shape in cases:
            largest = torch.finfo(dtype).max
            weight = KINDS[kind](weight_with_outliers(*shape)).clamp(-largest, largest).to(dtype)
            form = subject.fallback(shape)
            expected = self.reference(form, weight)
            if expected is None:
                pytest.skip("override `reference` with the arithmetic of the format, on whole tensors, step by step")
            assert_same(form.quantize(weight), expected)
