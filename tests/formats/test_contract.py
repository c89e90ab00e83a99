"""What every format promises. A new entry of FORMATS is tested here without a line of its own."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import format_reference
import numpy as np
import pytest
import torch
from covering import by_default
from helpers import default_dtype, round_once, stored_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from weights import QUANTIZABLE

from hf_trainweights.errors import ConfigError, CorruptFileError, QuantizationError
from hf_trainweights.formats import FORMATS, arithmetic, base, compiled_search, get_format
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.uint import UInt

GOLDEN = Path(__file__).parent / "golden"
WRITE_GOLDEN = "TRAINWEIGHTS_WRITE_GOLDEN"
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

# Every format can hold the first three; what it does with the others it says by `fallback`.
SHAPES = [(6, 256), (3, 4, 128), (2, 2, 3, 128)]
ODD_SHAPES = [(1, 1), (1, 256), (256, 1), (2, 1, 1), (3, 7), (5, 33), (2, 257), (4, 96), (2, 3, 40), (1, 2, 128)]
EMPTY_SHAPES = [(0, 128), (128, 0), (0, 0), (0, 4, 128), (2, 0, 128), (2, 4, 0)]

property_test = settings(deadline=None, derandomize=True, database=None, max_examples=20)


def variants() -> Iterator[Format]:
    """Yield each format with its defaults, and with every usual group size and number of bits that it takes."""
    choices = [{"group_size": group_size} for group_size in (32, 64, 128)] + [{"bits": bits} for bits in (2.5, 3, 8)]
    for name in QUANTIZABLE:
        yield get_format({"format": name})
        for chosen in choices:
            with contextlib.suppress(ConfigError):
                form = get_format({"format": name, **chosen})
                if form != get_format({"format": name}):
                    yield form


VARIANTS = list(variants())
COLUMN_SCALED = get_format({"format": "int4", "group_size": 32, "column_scale": True})
each_format = pytest.mark.parametrize("form", VARIANTS, ids=str)
# Where trying many weights takes long.
each_format_once = pytest.mark.parametrize(
    "form", by_default([get_format({"format": name}) for name in QUANTIZABLE], VARIANTS), ids=str
)
each_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)


def random_weight(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return normal values with a few outliers, as weights have them."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (values * (1 + values.abs().pow(3) / 8) / 16).to(dtype)


def groups_of(form: Format, K: int) -> int:
    """Return how many groups a row of K weights has, each with a scale of its own."""
    return K // (getattr(form, "group_size", None) or K)


def bound_of(form: Format) -> float:
    """Return the largest error that a format may make, as a fraction of the row's largest magnitude."""
    # The fewer codes there are, the farther apart they lie, and the more of an outlier the least squared error clips.
    return {"uint2": 0.75, "uint3": 0.4}.get(form.name, 0.25)


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for key, tensor in left.items():
        assert (tensor.shape, tensor.dtype) == (right[key].shape, right[key].dtype)
        assert stored_bits(tensor) == stored_bits(right[key]), key


def largest_error(form: Format, weight: Tensor) -> Tensor:
    """Return for each row the largest error as a fraction of the row's largest magnitude."""
    chosen = form.fallback(weight.shape)
    values = chosen.dequantize(chosen.quantize(weight), weight.shape, torch.float32).double()
    amax = weight.double().abs().amax(dim=-1)
    # No scale is below this, so what is smaller than that may become zero.
    smallest = 2.0**-126
    if isinstance(chosen, UInt):
        # Whole steps of the smallest scale lie apart, and those of float16 are not that small.
        smallest = arithmetic.SMALLEST_SCALE[weight.dtype] * chosen.grid.code_units
    return ((values - weight.double()).abs().amax(dim=-1) - smallest).clamp_min(0) / amax.clamp_min(1e-300)


# How exact


@pytest.mark.slow
@each_format
def test_every_value_has_the_nearest_code(form: Format) -> None:
    for dtype in FLOAT_DTYPES:
        weight = random_weight(6, 256, dtype=dtype)
        tensors, G = form.quantize(weight), groups_of(form, 256)
        wanted = weight.double().view(6, G, -1)
        values = form.dequantize(tensors, weight.shape, torch.float32).double().view(6, G, -1)
        # All values a group decodes to are codes of its scale, so no other of them may be nearer.
        nearest = (wanted.unsqueeze(-1) - values.unsqueeze(-2)).abs().amin(dim=-1)
        # What float32 arithmetic may do to a tie.
        tolerance = 1e-6 * wanted.abs().amax(dim=-1, keepdim=True)
        assert ((values - wanted).abs() <= nearest + tolerance).all(), dtype


@pytest.mark.slow
@each_format
def test_no_error_exceeds_a_part_of_the_rows_largest_magnitude(form: Format) -> None:
    for dtype in FLOAT_DTYPES:
        for exponent in (-24, -20, -17, -14, -8, 0, 8):
            weight = (random_weight(16, 256) * 2.0**exponent).to(dtype)
            assert largest_error(form, weight).max() <= bound_of(form), exponent


@pytest.mark.slow
@each_format_once
@property_test
@given(data=st.data())
def test_any_finite_weight_comes_back_finite_and_near(form: Format, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(FLOAT_DTYPES))
    shape = data.draw(st.tuples(st.integers(1, 4), st.sampled_from([1, 5, 32, 128])))
    largest = torch.finfo(dtype).max
    floats = st.floats(-largest, largest, width=16 if dtype is torch.float16 else 32)
    weight = torch.from_numpy(data.draw(arrays(np.float32, shape, elements=floats))).to(dtype)
    weight = weight.clamp(-largest, largest)
    assert largest_error(form, weight).max() <= bound_of(form)


@pytest.mark.slow
@each_format_once
@property_test
@given(
    values=arrays(np.float32, (2, 128), elements=st.integers(-1000, 1000)),
    exponent=st.integers(-30, 30),
)
def test_a_power_of_two_goes_into_the_scale_alone(form: Format, values: np.ndarray, exponent: int) -> None:
    weight = torch.from_numpy(values)
    tensors, larger = form.quantize(weight), form.quantize(weight * 2.0**exponent)
    assert_same(larger, tensors | {"scale": tensors["scale"] * 2.0**exponent})


@pytest.mark.slow
@each_format
def test_zero_rows_come_back_as_zeros_and_leave_the_others_alone(form: Format) -> None:
    weight = random_weight(6, 256)
    weight[1], weight[4] = 0.0, -0.0
    tensors = form.quantize(weight)
    values = form.dequantize(tensors, weight.shape, torch.float32)
    assert not values[[1, 4]].any()
    assert torch.equal(values[[0, 2, 3, 5]], rows_alone(form, weight[[0, 2, 3, 5]]))


def rows_alone(form: Format, weight: Tensor) -> Tensor:
    return form.dequantize(form.quantize(weight), weight.shape, torch.float32)


@pytest.mark.slow
@each_format
def test_the_largest_and_smallest_numbers_come_back_finite(form: Format) -> None:
    for dtype in FLOAT_DTYPES:
        numbers = torch.finfo(dtype)
        smallest = torch.tensor(numbers.tiny * numbers.eps, dtype=dtype)
        assert smallest > 0
        weight = torch.zeros(8, 256, dtype=dtype)
        weight[0, ::2], weight[0, 1::2] = numbers.max, numbers.min
        weight[1, 0], weight[1, 1:] = numbers.max, smallest
        weight[2, 3] = numbers.min
        weight[3], weight[4], weight[5, 7] = numbers.tiny, smallest, -smallest
        weight[6] = torch.linspace(-1, 1, 256).mul(numbers.max)
        weight[7] = torch.linspace(-1, 1, 256).mul(numbers.tiny)
        tensors = form.quantize(weight)
        assert torch.isfinite(tensors["scale"]).all()
        assert torch.isfinite(tensors["qdata"].float()).all()
        assert torch.isfinite(form.dequantize(tensors, weight.shape, dtype)).all()
        assert largest_error(form, weight).max() <= bound_of(form)


@pytest.mark.slow
@each_format
def test_dequantize_rounds_the_exact_product_once(form: Format) -> None:
    for dtype in FLOAT_DTYPES:
        weight = random_weight(64, 512, dtype=dtype)
        tensors = form.quantize(weight)
        G = tensors["scale"].shape[-1]
        unit = form.dequantize(tensors | {"scale": torch.ones_like(tensors["scale"])}, weight.shape, torch.float32)
        product = unit.double().view(64, G, -1) * tensors["scale"].double().unsqueeze(-1)
        for to in (*FLOAT_DTYPES, torch.float64):
            # The one product that does not fit float32 is rounded to it on the way to 16 bits.
            twice = dtype is torch.float32 and to in (torch.bfloat16, torch.float16)
            exact = round_once(product, torch.float32) if twice else product
            values = form.dequantize(tensors, weight.shape, to)
            assert stored_bits(values.abs()) == stored_bits(round_once(exact.view(64, 512), to).abs()), to


@pytest.mark.slow
@each_format
def test_scales_have_the_dtype_of_the_weight(form: Format) -> None:
    for dtype in FLOAT_DTYPES:
        assert form.quantize(random_weight(6, 256, dtype=dtype))["scale"].dtype == dtype


WEIGHTS = {
    "usual": lambda values: values,
    "zeros": lambda values: values * (values > 0.05),
    "negative zeros": lambda values: values * (values > 2),
    "one sign": lambda values: values.abs(),
    "other sign": lambda values: -values.abs(),
    "even tails": lambda values: values.sign(),
    "smallest normal": lambda values: values * 2.0**-126,
    "denormal": lambda values: values * 2.0**-140,
    "small of float16": lambda values: values * 2.0**-18,
    "squares overflow": lambda values: values.clamp(-1, 1) * 2.0**100,
    "largest": lambda values: (values * 2.0**140).clamp(-3e38, 3e38),
}
REFERENCE_SHAPES = [(1, 1), (1, 7), (257, 3), (3, 96), (2, 128)]


@pytest.mark.slow
@pytest.mark.covering(1)
@each_format
@each_dtype
def test_every_bit_is_that_of_the_plain_arithmetic(form: Format, dtype: torch.dtype) -> None:
    for shape in REFERENCE_SHAPES:
        assert_every_bit(form, dtype, "usual", shape)
    for kind in WEIGHTS:
        for shape in ((5, 33), (9, 512)):
            assert_every_bit(form, dtype, kind, shape)


@pytest.mark.slow
@pytest.mark.covering(1)
@each_format
@each_dtype
@pytest.mark.parametrize("kind", WEIGHTS)
def test_every_bit_of_a_weight_of_two_cache_blocks_is_so(form: Format, dtype: torch.dtype, kind: str) -> None:
    assert_every_bit(form, dtype, kind, (130, 1024))


@pytest.mark.exhaustive
@each_format
@each_dtype
def test_every_bit_of_a_weight_of_two_blocks_is_so(form: Format, dtype: torch.dtype) -> None:
    assert_every_bit(form, dtype, "usual", (1100, 2048))


def assert_every_bit(form: Format, dtype: torch.dtype, kind: str, shape: tuple[int, ...]) -> None:
    largest = torch.finfo(dtype).max
    weight = WEIGHTS[kind](random_weight(*shape)).clamp(-largest, largest).to(dtype)
    chosen = form.fallback(shape)
    assert_same(chosen.quantize(weight), format_reference.quantize(chosen, weight))


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTIZABLE)
def test_threads_do_not_matter(name: str) -> None:
    form = get_format({"format": name})
    weight = random_weight(130, 1024, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_same(form.quantize(weight), format_reference.quantize(form, weight))
    finally:
        torch.set_num_threads(before)


# Which tensors


@pytest.mark.slow
@each_format
def test_stored_tensors_are_those_of_the_specification(form: Format) -> None:
    for dtype, shape in itertools.product(FLOAT_DTYPES, (*SHAPES, *ODD_SHAPES, *EMPTY_SHAPES)):
        assert_as_specified(form, dtype, shape)


def assert_as_specified(form: Format, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    chosen = form.fallback(shape)
    tensors = chosen.quantize(random_weight(*shape, dtype=dtype))
    found = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
    assert found == chosen.tensor_specs(shape, dtype)
    assert list(found) == list(chosen.tensor_names)
    assert chosen.tensor_names[0] == "qdata"
    assert all(tensor.is_contiguous() and type(tensor) is Tensor for tensor in tensors.values())
    assert chosen.stored_bytes(shape, dtype) == sum(tensor.nbytes for tensor in tensors.values())
    assert chosen.shape_of(tensors["qdata"]) == shape
    values = chosen.dequantize(tensors, shape, dtype)
    assert (values.shape, values.dtype, values.is_contiguous()) == (shape, dtype, True)


@each_format
def test_what_is_empty_holds_no_garbage(form: Format) -> None:
    for shape in EMPTY_SHAPES:
        tensors = form.fallback(shape).quantize(torch.empty(shape))
        assert all(not tensor.float().any() for tensor in tensors.values())


@pytest.mark.slow
@each_format
def test_the_fallback_holds_every_shape(form: Format) -> None:
    for shape in (*SHAPES, *ODD_SHAPES, *EMPTY_SHAPES):
        chosen = form.fallback(shape)
        assert chosen.fallback(shape) == chosen
        assert form.fallback(shape) == form.fallback(torch.Size(shape)) == form.fallback(list(shape))
        if 0 not in shape:
            assert largest_error(form, random_weight(*shape)).max() <= bound_of(form), shape


@each_format
def test_usual_shapes_need_no_fallback(form: Format) -> None:
    assert [form.fallback(shape) for shape in SHAPES] == [form] * len(SHAPES)


@each_format
def test_shapes_that_need_the_fallback_are_refused_without_it(form: Format) -> None:
    for shape in ODD_SHAPES + EMPTY_SHAPES:
        if form.fallback(shape) != form:
            with pytest.raises(QuantizationError, match=r"layer\.weight: expected a shape that .* can hold, found \("):
                form.quantize(torch.zeros(shape), "layer.weight")


@each_format
def test_the_description_survives_json(form: Format) -> None:
    copied = get_format(json.loads(json.dumps(form.get_config())))
    assert copied == form
    assert hash(copied) == hash(form)
    assert copied.get_config() == form.get_config()
    assert form.get_config()["format"] == form.name


def test_no_two_formats_look_the_same() -> None:
    assert len({str(form) for form in VARIANTS}) == len(set(VARIANTS)) == len(VARIANTS)


# Pure functions


@pytest.mark.slow
@each_format
def test_the_same_weight_gives_the_same_bytes(form: Format) -> None:
    assert_same(form.quantize(random_weight(6, 256)), form.quantize(random_weight(6, 256)))


@pytest.mark.slow
@each_format
def test_strides_do_not_matter(form: Format) -> None:
    for dtype in FLOAT_DTYPES:
        weight = random_weight(6, 256, dtype=dtype)
        expected = form.quantize(weight)
        spread = torch.zeros(12, 512, dtype=dtype)
        spread[::2, ::2] = weight
        assert_same(form.quantize(weight.t().contiguous().t()), expected)
        assert_same(form.quantize(spread[::2, ::2]), expected)
        row = weight[:1].expand(4, 256)
        assert_same(form.quantize(row), form.quantize(row.contiguous()))


@each_format
def test_the_weight_is_neither_changed_nor_kept(form: Format) -> None:
    weight = nn.Parameter(random_weight(6, 256))
    before = weight.detach().clone()
    tensors = form.quantize(weight)
    values = form.dequantize(tensors, weight.shape, weight.dtype)
    assert torch.equal(weight, before)
    storages = {tensor.untyped_storage().data_ptr() for tensor in (weight, values, *tensors.values())}
    assert len(storages) == 2 + len(tensors)
    assert not any(tensor.requires_grad for tensor in tensors.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("is_compiled", [True, False])
@each_format_once
def test_the_default_dtype_changes_nothing(
    form: Format, is_compiled: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setattr(compiled_search, "_load", lambda: None)
    weight = random_weight(16, 256)
    stored = form.quantize(weight)
    with default_dtype(dtype):
        found = form.quantize(weight)
        dequantized = form.dequantize(found, weight.shape, torch.float32)
    assert all(torch.equal(found[name], stored[name]) for name in form.tensor_names)
    assert torch.equal(dequantized, form.dequantize(stored, weight.shape, torch.float32))


@each_format
def test_dequantize_changes_nothing(form: Format) -> None:
    tensors = form.quantize(random_weight(6, 256))
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    for dtype in FLOAT_DTYPES:
        form.dequantize(tensors, (6, 256), dtype)
    assert_same(tensors, before)


@pytest.mark.slow
@each_format
def test_blocks_of_rows_and_cache_blocks_give_what_the_whole_gives(
    form: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random_weight(2, 7, 256, dtype=torch.bfloat16)
    whole = form.quantize(weight)
    for elements in (1, 256, 600, 3 * 256):
        with monkeypatch.context() as patched:
            patched.setattr(arithmetic, "CACHE_BLOCK_ELEMENTS", elements)
            assert_same(form.quantize(weight), whole)
            patched.setattr(base, "BLOCK_ELEMENTS", 2 * elements)
            assert_same(form.quantize(weight), whole)


@pytest.mark.slow
@each_format
def test_experts_are_quantized_one_by_one(form: Format) -> None:
    for lead in ((3,), (2, 2)):
        weight = random_weight(*lead, 4, 128)
        tensors = form.quantize(weight)
        for index in np.ndindex(lead):
            alone = form.quantize(weight[index])
            assert_same({key: tensor[index] for key, tensor in tensors.items()}, alone)
            values = form.dequantize(tensors, weight.shape, torch.float32)[index]
            assert torch.equal(values, form.dequantize(alone, (4, 128), torch.float32))


@pytest.mark.slow
@each_format
@pytest.mark.parametrize("device", DEVICES)
def test_work_stays_on_the_device_of_the_weight(form: Format, device: str) -> None:
    weight = random_weight(6, 256)
    tensors = form.quantize(weight.to(device))
    assert {tensor.device.type for tensor in tensors.values()} == {device}
    on_cpu = form.dequantize({key: tensor.cpu() for key, tensor in tensors.items()}, weight.shape, torch.bfloat16)
    assert torch.equal(form.dequantize(tensors, weight.shape, torch.bfloat16).cpu(), on_cpu)


# Bad input


@pytest.mark.slow
@each_format
def test_a_value_that_is_not_finite_is_refused_by_name(form: Format) -> None:
    for dtype in FLOAT_DTYPES:
        weight = random_weight(6, 256, dtype=dtype)
        for value in (float("nan"), float("inf"), float("-inf")):
            weight[5, 255] = value
            with pytest.raises(QuantizationError, match=r"0\.up_proj: expected finite values, found NaN or Inf in row"):
                form.quantize(weight, "layers.0.up_proj")


@pytest.mark.slow
@each_format
def test_a_value_that_is_not_finite_is_found_in_the_last_block(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "BLOCK_ELEMENTS", 2 * 256)
    weight = random_weight(3, 7, 256)
    weight[2, 6, 0] = torch.nan
    with pytest.raises(QuantizationError, match=r"experts: expected finite values, found NaN or Inf in rows 6 to 6"):
        form.quantize(weight, "experts")


@pytest.mark.covering(1)
@each_format
@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(4, 128, dtype=torch.float64),
        torch.zeros(4, 128, dtype=torch.int8),
        torch.zeros(4, 128, dtype=torch.int64),
        torch.zeros(4, 128, dtype=torch.bool),
        torch.zeros(4, 128, dtype=torch.complex64),
        torch.zeros(4, 128).to(torch.float8_e4m3fn),
        torch.zeros(128),
        torch.zeros(()),
    ],
    ids=lambda weight: f"{weight.dtype}-{weight.dim()}d",
)
def test_what_is_no_float_matrix_is_refused_by_name(form: Format, weight: Tensor) -> None:
    with pytest.raises(QuantizationError, match=r"head\.weight: expected a float32, .*modules_to_not_convert"):
        form.quantize(weight, "head.weight")


DAMAGES = {
    "missing": lambda tensor: None,
    "cut": lambda tensor: tensor[:-1],
    "narrow": lambda tensor: tensor[..., :-1],
    "flat": lambda tensor: tensor.flatten(),
    "another dtype": lambda tensor: tensor.to(torch.float64),
}


@pytest.mark.covering(1)
@each_format
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tensors_are_refused_by_name(form: Format, damage: str) -> None:
    whole = form.quantize(random_weight(6, 256))
    for key in form.tensor_names:
        tensors = {**whole, key: DAMAGES[damage](whole[key])}
        if tensors[key] is None:
            del tensors[key]
        with pytest.raises(CorruptFileError, match=rf"weight: expected {key} to be .*'format': '{form.name}'"):
            form.dequantize(tensors, (6, 256), torch.float32)
        with pytest.raises(CorruptFileError, match=rf"layers\.3\.weight: expected {key} to be"):
            form.check(tensors, (6, 256), "layers.3.weight")


@pytest.mark.slow
@each_format
def test_tensors_of_another_shape_are_refused(form: Format) -> None:
    tensors = form.quantize(random_weight(6, 256))
    for shape in ((6, 128), (12, 128), (5, 256), (1, 6, 256), (6, 512)):
        with pytest.raises(CorruptFileError, match="weight: expected qdata to be"):
            form.dequantize(tensors, shape, torch.float32)


@pytest.mark.parametrize(
    "config",
    [{}, {"format": None}, {"format": "int3"}, {"format": ["int4"]}, {"format": "INT8"}, {"format": 8}],
    ids=str,
)
def test_an_unknown_format_is_refused_with_the_known_ones(config: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"format: expected one of {', '.join(FORMATS)}, found"):
        get_format(config)


@pytest.mark.parametrize("name", FORMATS)
def test_an_unknown_parameter_is_refused(name: str) -> None:
    for unknown in ("blocksize", "name", "tensor_names"):
        with pytest.raises(ConfigError, match=f"format {name}: expected .*, found {unknown}"):
            get_format({"format": name, unknown: 1})


# What was written once is read for ever


def golden_weight(dtype: torch.dtype) -> Tensor:
    """Return values that need no random generator, among them zeros and the smallest numbers."""
    index = torch.arange(4 * 128, dtype=torch.float64).view(4, 128)
    spread = ((index * index * 7919 + index * 104729) % 20011 - 10005) / 10005
    weight = spread.pow(3) / 4
    weight[1], weight[2] = 0, spread[2] * 2.0**-20
    weight[3, ::16] *= 8
    return weight.to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("form", [*VARIANTS, COLUMN_SCALED], ids=str)
def test_golden_bytes_are_written_and_read_as_ever(form: Format) -> None:
    file = GOLDEN / f"{str(form).replace(' ', '_')}.safetensors"
    if os.environ.get(WRITE_GOLDEN) == "1" and not file.exists():
        write_golden(form, file)
    assert file.exists(), f"{file} is part of the repository; a new format writes it under {WRITE_GOLDEN}=1"
    golden = load_file(file)
    for dtype in FLOAT_DTYPES:
        weight, values, *stored = (golden[f"{dtype}.{key}"] for key in ("weight", "values", *form.tensor_names))
        tensors = dict(zip(form.tensor_names, stored, strict=True))
        assert stored_bits(form.dequantize(tensors, weight.shape, dtype)) == stored_bits(values)
        assert_same(form.quantize(weight), tensors)


def write_golden(form: Format, file: Path) -> None:
    golden = {}
    for dtype in FLOAT_DTYPES:
        weight = golden_weight(dtype)
        tensors = form.quantize(weight)
        values = form.dequantize(tensors, weight.shape, dtype)
        golden |= {f"{dtype}.{key}": tensor for key, tensor in {"weight": weight, "values": values, **tensors}.items()}
    file.parent.mkdir(exist_ok=True)
    save_file(golden, file)
