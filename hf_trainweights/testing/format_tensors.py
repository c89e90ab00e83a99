"""The stored tensors of a format: their shapes, their independence of all but the weight, and bad input."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_trainweights.errors import ConfigError, CorruptFileError, QuantizationError
from hf_trainweights.formats import FORMATS, arithmetic, base, get_format, parameters_of
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.column_scale import ColumnScaled
from hf_trainweights.testing.format_values import FormatSubjects, values_of
from hf_trainweights.testing.values import assert_same, stored_bits, weight_with_outliers

WRITE_GOLDEN = "TRAINWEIGHTS_WRITE_GOLDEN"

# Every format can hold the first three; for the others `fallback` names the format that can.
SHAPES = [(6, 256), (3, 4, 128), (2, 2, 3, 128)]
ODD_SHAPES = [(1, 1), (1, 256), (256, 1), (2, 1, 1), (3, 7), (5, 33), (2, 257), (4, 96), (2, 3, 40), (1, 2, 128)]
EMPTY_SHAPES = [(0, 128), (128, 0), (0, 0), (0, 4, 128), (2, 0, 128), (2, 4, 0)]
_DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
_NO_FLOAT_MATRICES = [
    *(torch.zeros(4, 128, dtype=dtype) for dtype in (torch.float64, torch.int8, torch.bool, torch.complex64)),
    torch.zeros(4, 128).to(torch.float8_e4m3fn),
    torch.zeros(128),
    torch.zeros(()),
]
_DAMAGES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "missing": lambda tensor: None,
    "cut": lambda tensor: tensor[:-1],
    "narrow": lambda tensor: tensor[..., :-1],
    "flat": lambda tensor: tensor.flatten(),
    "another dtype": lambda tensor: tensor.to(torch.float64),
}


class FormatTensors(FormatSubjects):
    """The part of `FormatContract` about stored tensors."""

    def test_it_is_registered_under_its_name(self, subject: Format) -> None:
        """Files name the format, so `FORMATS[name]` must be its class before a file is read."""
        form = subject.inner if isinstance(subject, ColumnScaled) else subject
        advice = f'Run FORMATS["{form.name}"] = {type(form).__name__} where the class is defined.'
        assert FORMATS.get(form.name) is type(form), advice

    def test_the_description_survives_json(self, subject: Format) -> None:
        """`config.json` keeps `get_config()`: the fields of the dataclass, all of them values that JSON has."""
        copied = get_format(json.loads(json.dumps(subject.get_config())))
        assert copied == subject
        assert hash(copied) == hash(subject)
        assert copied.get_config() == subject.get_config()
        assert subject.get_config()["format"] == subject.name

    def test_an_unknown_parameter_is_refused(self, subject: Format) -> None:
        """The class is a dataclass, so `get_format` knows which parameters there are."""
        for unknown in {"blocksize", "name", "tensor_names"} - set(parameters_of(subject.name)):
            with pytest.raises(ConfigError, match=f"format {subject.name}: expected .*, found {unknown}"):
                get_format({"format": subject.name, unknown: 1})

    def test_stored_tensors_are_those_that_it_declares(self, subject: Format) -> None:
        """`tensor_specs`, `tensor_names` and `shape_of` describe the tensors that `quantize` stores.

        If `qdata` has another shape than the weight, `shape_of` must compute the weight's shape from it.
        """
        for dtype, shape in itertools.product(FLOAT_DTYPES, (*SHAPES, *ODD_SHAPES, *EMPTY_SHAPES)):
            form = subject.fallback(shape)
            tensors = form.quantize(weight_with_outliers(*shape, dtype=dtype))
            stored = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
            assert stored == form.tensor_specs(shape, dtype), shape
            assert list(stored) == list(form.tensor_names), "list the names in `tensor_names`, in their order"
            assert form.tensor_names[0] == "qdata", "the first of `tensor_names` is qdata"
            assert all(tensor.is_contiguous() and type(tensor) is Tensor for tensor in tensors.values())
            assert form.stored_bytes(shape, dtype) == sum(tensor.nbytes for tensor in tensors.values())
            assert form.shape_of(tensors["qdata"]) == shape, "shape_of(qdata) is not the shape of the weight"
            values = form.dequantize(tensors, shape, dtype)
            assert (values.shape, values.dtype, values.is_contiguous()) == (shape, dtype, True)

    def test_scales_have_the_dtype_of_the_weight(self, subject: Format) -> None:
        """The dtype of a scale tells a reader of files which dtype the weight had."""
        for dtype in FLOAT_DTYPES:
            assert subject.quantize(weight_with_outliers(6, 256, dtype=dtype))["scale"].dtype == dtype

    def test_empty_weights_hold_no_garbage(self, subject: Format) -> None:
        """Equal weights give equal files, also where a group has no columns."""
        for shape in EMPTY_SHAPES:
            tensors = subject.fallback(shape).quantize(torch.empty(shape))
            assert all(not tensor.float().any() for tensor in tensors.values()), shape

    def test_the_fallback_holds_every_shape(self, subject: Format) -> None:
        """`fallback` names a format that can hold the shape, such as int8 for rows that do not fill a word."""
        assert [subject.fallback(shape) for shape in SHAPES] == [subject] * len(SHAPES), "usual shapes need no fallback"
        for shape in (*SHAPES, *ODD_SHAPES, *EMPTY_SHAPES):
            form = subject.fallback(shape)
            assert form.fallback(shape) == form, f"{form} cannot hold {shape} either"
            assert subject.fallback(torch.Size(shape)) == subject.fallback(list(shape)) == form
            if 0 not in shape:
                self.assert_near(subject, weight_with_outliers(*shape), shape)

    def test_shapes_that_need_the_fallback_are_refused_without_it(self, subject: Format) -> None:
        """`Format.quantize` asks `fallback`; a subclass leaves `quantize` and `check_weight` as they are."""
        for shape in ODD_SHAPES + EMPTY_SHAPES:
            if subject.fallback(shape) != subject:
                with pytest.raises(QuantizationError, match=r"layer\.weight: expected a shape that .* can hold, found"):
                    subject.quantize(torch.zeros(shape), "layer.weight")

    def test_only_the_values_of_the_weight_matter(self, subject: Format) -> None:
        """Neither strides nor the number of threads change a byte, and the same weight gives the same bytes.

        `quantize_rows` must fill each tensor of `out`, which holds any numbers before.
        """
        for dtype in FLOAT_DTYPES:
            weight = weight_with_outliers(6, 256, dtype=dtype)
            expected = subject.quantize(weight)
            assert_same(subject.quantize(weight.clone()), expected)
            spread = torch.zeros(12, 512, dtype=dtype)
            spread[::2, ::2] = weight
            assert_same(subject.quantize(weight.t().contiguous().t()), expected)
            assert_same(subject.quantize(spread[::2, ::2]), expected)
            row = weight[:1].expand(4, 256)
            assert_same(subject.quantize(row), subject.quantize(row.contiguous()))
        weight, threads = weight_with_outliers(130, 1024, dtype=torch.bfloat16), torch.get_num_threads()
        expected = subject.quantize(weight)
        torch.set_num_threads(1 if threads > 1 else 2)
        try:
            assert_same(subject.quantize(weight), expected)
        finally:
            torch.set_num_threads(threads)

    def test_the_weight_is_neither_changed_nor_kept(self, subject: Format) -> None:
        """`rows` may be the user's own weight: write into `out` and into new tensors alone."""
        weight = nn.Parameter(weight_with_outliers(6, 256))
        before = weight.detach().clone()
        tensors = subject.quantize(weight)
        values = subject.dequantize(tensors, weight.shape, weight.dtype)
        assert torch.equal(weight, before), "quantize changed the weight"
        storages = {tensor.untyped_storage().data_ptr() for tensor in (weight, values, *tensors.values())}
        assert len(storages) == 2 + len(tensors), "two tensors share memory"
        assert not any(tensor.requires_grad for tensor in tensors.values())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
    def test_the_default_dtype_changes_nothing(self, subject: Format, dtype: torch.dtype) -> None:
        """Training in half precision changes PyTorch's default dtype; name the dtype of each tensor that you make."""
        weight = weight_with_outliers(16, 256)
        stored = subject.quantize(weight)
        values = subject.dequantize(stored, weight.shape, torch.float32)
        torch.set_default_dtype(dtype)
        try:
            assert_same(subject.quantize(weight), stored)
            assert torch.equal(subject.dequantize(stored, weight.shape, torch.float32), values)
        finally:
            torch.set_default_dtype(torch.float32)

    def test_dequantize_changes_no_stored_tensor(self, subject: Format) -> None:
        """Stored tensors may be views of a file: make new tensors, and use no in-place operation on them."""
        tensors = subject.quantize(weight_with_outliers(6, 256))
        before = {key: tensor.clone() for key, tensor in tensors.items()}
        for dtype in FLOAT_DTYPES:
            subject.dequantize(tensors, (6, 256), dtype)
        assert_same(tensors, before)

    def test_blocks_of_rows_give_the_tensors_of_the_whole(
        self, subject: Format, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`quantize_rows` gets some rows at a time, and their codes may depend on no other rows.

        A format that needs all rows overrides `Format.fit`: it gets the matrix and returns the format for its rows.
        """
        weight = weight_with_outliers(2, 7, 256, dtype=torch.bfloat16)
        whole = subject.quantize(weight)
        for elements in (1, 256, 600, 3 * 256):
            with monkeypatch.context() as patched:
                patched.setattr(arithmetic, "CACHE_BLOCK_ELEMENTS", elements)
                assert_same(subject.quantize(weight), whole)
                patched.setattr(base, "BLOCK_ELEMENTS", 2 * elements)
                assert_same(subject.quantize(weight), whole)

    def test_experts_are_quantized_one_by_one(self, subject: Format) -> None:
        """Leading dimensions are experts: `dequantize_rows`, `tensor_specs` and `shape_of` take them too."""
        for lead in ((3,), (2, 2)):
            weight = weight_with_outliers(*lead, 4, 128)
            tensors = subject.quantize(weight)
            for index in itertools.product(*map(range, lead)):
                alone = subject.quantize(weight[index])
                assert_same({key: tensor[index] for key, tensor in tensors.items()}, alone)
                values = subject.dequantize(tensors, weight.shape, torch.float32)[index]
                assert torch.equal(values, subject.dequantize(alone, (4, 128), torch.float32)), index

    @pytest.mark.parametrize("device", _DEVICES)
    def test_work_stays_on_the_device_of_the_weight(self, subject: Format, device: str) -> None:
        """Make constants on the device of the rows, and choose the same codes on each device."""
        weight = weight_with_outliers(6, 256)
        tensors = subject.quantize(weight.to(device))
        assert {tensor.device.type for tensor in tensors.values()} == {device}
        values = values_of(subject, weight, torch.bfloat16)
        assert torch.equal(subject.dequantize(tensors, weight.shape, torch.bfloat16).cpu(), values)

    def test_values_that_are_not_finite_are_refused_by_name(
        self, subject: Format, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`Format.quantize` refuses them before `quantize_rows` sees a block; a subclass does not override it."""
        for dtype, value in itertools.product(FLOAT_DTYPES, (torch.nan, torch.inf, -torch.inf)):
            weight = weight_with_outliers(6, 256, dtype=dtype)
            weight[5, 255] = value
            with pytest.raises(QuantizationError, match=r"0\.up_proj: expected finite values, found NaN or Inf in row"):
                subject.quantize(weight, "layers.0.up_proj")
        monkeypatch.setattr(base, "BLOCK_ELEMENTS", 2 * 256)
        weight = weight_with_outliers(3, 7, 256)
        weight[2, 6, 0] = torch.nan
        with pytest.raises(QuantizationError, match="experts: expected finite values, found NaN or Inf in rows 6 to 6"):
            subject.quantize(weight, "experts")

    @pytest.mark.parametrize("weight", _NO_FLOAT_MATRICES, ids=lambda weight: f"{weight.dtype}-{weight.dim()}d")
    def test_values_that_are_no_float_matrix_are_refused_by_name(self, subject: Format, weight: Tensor) -> None:
        """`Format.check_weight` refuses them; a subclass does not override it."""
        with pytest.raises(QuantizationError, match=r"head\.weight: expected a float32, .*modules_to_not_convert"):
            subject.quantize(weight, "head.weight")

    @pytest.mark.parametrize("damage", _DAMAGES)
    def test_damaged_tensors_are_refused_by_name(self, subject: Format, damage: str) -> None:
        """`tensor_specs` must give one shape and dtype for each stored tensor, by which a file is checked."""
        whole = subject.quantize(weight_with_outliers(6, 256))
        for key in subject.tensor_names:
            damaged = _DAMAGES[damage](whole[key])
            tensors = {name: tensor for name, tensor in whole.items() if name != key}
            tensors |= {} if damaged is None else {key: damaged}
            with pytest.raises(CorruptFileError, match=rf"weight: expected {key} to be .*'format': '{subject.name}'"):
                subject.dequantize(tensors, (6, 256), torch.float32)
            with pytest.raises(CorruptFileError, match=rf"layers\.3\.weight: expected {key} to be"):
                subject.check(tensors, (6, 256), "layers.3.weight")

    def test_tensors_of_another_shape_are_refused(self, subject: Format) -> None:
        """`tensor_specs` must give another shape for another weight, so that a wrong file is never read as right."""
        tensors = subject.quantize(weight_with_outliers(6, 256))
        for shape in ((6, 128), (12, 128), (5, 256), (1, 6, 256), (6, 512)):
            with pytest.raises(CorruptFileError, match="weight: expected qdata to be"):
                subject.dequantize(tensors, shape, torch.float32)

    def test_golden_bytes_are_written_and_read_as_ever(self, subject: Format) -> None:
        """A file that was written once is read for ever, and the same weight gives the same bytes in all versions."""
        if self.golden is None:
            pytest.skip(f"set `golden` to a directory, and run once under {WRITE_GOLDEN}=1 before files are shared")
        file = self.golden / f"{str(subject).replace(' ', '_')}.safetensors"
        if os.environ.get(WRITE_GOLDEN) == "1" and not file.exists():
            _write_golden(subject, file)
        assert file.exists(), f"{file} belongs to the repository; run this test once under {WRITE_GOLDEN}=1"
        golden = load_file(file)
        for dtype in FLOAT_DTYPES:
            weight, values, *stored = (golden[f"{dtype}.{key}"] for key in ("weight", "values", *subject.tensor_names))
            tensors = dict(zip(subject.tensor_names, stored, strict=True))
            assert stored_bits(subject.dequantize(tensors, weight.shape, dtype)) == stored_bits(values), dtype
            assert_same(subject.quantize(weight), tensors)


def _write_golden(form: Format, file: Path) -> None:
    golden = {}
    for dtype in FLOAT_DTYPES:
        weight = _golden_weight(dtype)
        tensors = form.quantize(weight)
        values = form.dequantize(tensors, weight.shape, dtype)
        golden |= {f"{dtype}.{key}": tensor for key, tensor in {"weight": weight, "values": values, **tensors}.items()}
    file.parent.mkdir(exist_ok=True)
    save_file(golden, file)


def _golden_weight(dtype: torch.dtype) -> Tensor:
    """Return values that need no random generator, among them zeros and the smallest numbers."""
    index = torch.arange(4 * 128, dtype=torch.float64).view(4, 128)
    spread = ((index * index * 7919 + index * 104729) % 20011 - 10005) / 10005
    weight = spread.pow(3) / 4
    weight[1], weight[2] = 0, spread[2] * 2.0**-20
    weight[3, ::16] *= 8
    return weight.to(dtype)
