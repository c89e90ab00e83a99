"""The contract of a format. Subclass it in a module that pytest collects, and name the format."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_trainweights.errors import QuantizationError
from hf_trainweights.files.coded_tensors import encode_tensors
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.columns import ColumnCodes
from hf_trainweights.formats.cutting import cut_columns, cut_rows, join_columns
from hf_trainweights.tensor.modules import as_parameter
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor
from hf_trainweights.testing.format_tensors import FormatTensors
from hf_trainweights.testing.format_values import FormatValues
from hf_trainweights.testing.values import assert_same, weight_with_outliers

_CUT_SHAPES = [(6, 256), (2, 6, 256)]
_N, _K = 24, 256


class FormatContract(FormatValues, FormatTensors):
    """The promises of a format to files, products, exports and calibration.

    A test that a format need not pass, such as that of `columns`, is skipped with the reason. Each other test tells in
    its docstring how a format keeps the promise.

    Examples:
        >>> from hf_trainweights.formats.int8 import Int8
        >>> class TestInt8(FormatContract):
        ...     formats = (Int8(),)
    """

    def test_columns_that_are_cut_are_those_of_the_weight_and_come_together_again(self, subject: Format) -> None:
        """Tensor parallelism cuts columns: `column_step` tells how many share a scale or a word."""
        for shape in _CUT_SHAPES:
            stored = subject.quantize(weight_with_outliers(*shape))
            whole, half = subject.dequantize(stored, shape, torch.float32), (*shape[:-1], 128)
            parts = [cut_columns(subject, stored, shape, start, start + 128) for start in (0, 128)]
            values = [subject.dequantize(cut, half, torch.float32) for cut in parts]
            assert torch.equal(torch.cat(values, -1), whole), "a part has other values than the weight"
            assert all(tensor.is_contiguous() for cut in parts for tensor in cut.values())
            assert_same(join_columns(subject, parts, [128, 128]), stored)

    def test_columns_are_cut_at_each_step(self, subject: Format) -> None:
        """`column_step` is the group size, or 1: override it if a word of `qdata` holds more columns than that."""
        for shape in _CUT_SHAPES:
            stored, step = subject.quantize(weight_with_outliers(*shape)), subject.column_step
            whole, stop = subject.dequantize(stored, shape, torch.float32), 256 if step >= 128 else 256 - step
            own = cut_columns(subject, stored, shape, step, stop)
            values = subject.dequantize(own, (*shape[:-1], stop - step), torch.float32)
            assert torch.equal(values, whole[..., step:stop])

    @pytest.mark.parametrize(("start", "stop"), [(0, 257), (-32, 32), (64, 64), (128, 0)])
    def test_columns_outside_the_weight_are_refused(self, subject: Format, start: int, stop: int) -> None:
        """Whoever asks for columns that a weight does not have gets an error, not fewer columns."""
        with pytest.raises(QuantizationError, match="a part of 256 columns at multiples of"):
            cut_columns(subject, subject.quantize(weight_with_outliers(6, 256)), (6, 256), start, stop)

    def test_rows_that_are_cut_are_those_of_the_weight(self, subject: Format) -> None:
        """Each stored tensor is `[*, N, k]`; name those that all rows share, `[*, 1, k]`, in `shared_names`."""
        for shape in _CUT_SHAPES:
            stored = subject.quantize(weight_with_outliers(*shape))
            own = cut_rows(subject, stored, lambda tensor: tensor[..., 1:3, :])
            values = subject.dequantize(own, (*shape[:-2], 2, 256), torch.float32)
            assert torch.equal(values, subject.dequantize(stored, shape, torch.float32)[..., 1:3, :])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_a_layer_computes_as_with_the_dequantized_weight(self, subject: Format, dtype: torch.dtype) -> None:
        """A product dequantizes some rows of the weight at a time, so `dequantize_rows` takes any rows of it."""
        weight = QuantizedTensor.quantize(weight_with_outliers(_N, _K, dtype=dtype), subject)
        layer = nn.Linear(_K, _N, bias=False, device="meta")
        layer.weight = as_parameter(weight)
        for rows in (1, 5, 300):
            x = weight_with_outliers(rows, _K, dtype=dtype, seed=rows)
            exact = F.linear(x.double(), weight.dequantize(torch.float32).double())
            size, allowed = exact.norm().item(), 1.5 * (F.linear(x, weight.dequantize()).double() - exact).norm().item()
            error = (layer(x).double() - exact).norm().item()
            assert error <= max(allowed, 0.75 * torch.finfo(dtype).eps * size, 1e-6 * size), f"{rows} rows of x"

    @pytest.mark.parametrize("as_bytes", [False, True])
    def test_unpacked_parts_make_the_weight(self, subject: Format, as_bytes: bool) -> None:
        """`unpack` serves exports of graphs and reports; see `formats/unpacked.py` for the parts that it returns."""
        for shape in ((24, 256), (3, 8, 128)):
            stored = subject.quantize(weight_with_outliers(*shape))
            plain = dict(stored)
            if as_bytes and stored["qdata"].dtype != torch.int8:
                plain["qdata"] = stored["qdata"].view(torch.uint8)
            unpacked, wanted = subject.unpack(plain), subject.dequantize(stored, shape, torch.float32)
            if unpacked is None:
                pytest.skip("no `unpack`: ONNX, TorchScript and .pt2 refuse this format")
            assert torch.equal(unpacked.weight(), wanted)
            numbers, scale = unpacked.numbers(), unpacked.group_scale
            groups = numbers.unflatten(-1, (scale.shape[-1], -1))
            zeros = torch.zeros(1, 1) if unpacked.zeros is None else unpacked.zeros
            torch.testing.assert_close(((groups - zeros.unsqueeze(-1)) * scale.unsqueeze(-1)).flatten(-2), wanted)
            if unpacked.limits is not None:
                assert torch.equal(numbers, numbers.round())
                assert unpacked.limits[0] <= numbers.min() <= numbers.max() <= unpacked.limits[1]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_columns_that_matter_alike_get_the_codes_of_quantize(self, subject: Format, dtype: torch.dtype) -> None:
        """Calibration may only improve a format, so where all columns matter alike it must change no code."""
        weight = uneven_weight(dtype)
        tensors, _ = choose_columns(subject, weight, torch.ones(_K))
        # A format for entropy-coded files takes codes with a larger error if they need fewer bits there.
        if not subject.is_coded_in_files:
            assert_same(tensors, subject.quantize(weight))

    def test_tensors_hold_the_values_that_were_chosen(self, subject: Format) -> None:
        """`ColumnCodes.tensors` packs the codes whose values `encode` has returned."""
        weight = uneven_weight(torch.bfloat16)
        tensors, values = choose_columns(subject, weight, torch.linspace(0.5, 4, _K))
        subject.check(tensors, weight.shape)
        assert all(tensor.is_contiguous() for tensor in tensors.values())
        dequantized = subject.dequantize(tensors, weight.shape, torch.float32)
        # A format for entropy-coded files chooses all columns several times, and its tensors are not always the last.
        if not subject.is_coded_in_files:
            torch.testing.assert_close(dequantized, values, rtol=1e-6, atol=0)
        # Random codes would lose more than the norm of the weight, and formats of two bits lose about half of it.
        assert (dequantized - weight.float()).norm() < 0.6 * weight.float().norm()

    def test_errors_move_to_columns_that_matter_less(self, subject: Format) -> None:
        """`importance` weighs the errors by which scales are chosen; ignoring it loses the gain of calibration."""
        weight, importance = uneven_weight(torch.bfloat16), torch.ones(_K)
        importance[::2] = 100
        importance /= importance.mean()

        def cost(tensors: Mapping[str, Tensor]) -> float:
            error = subject.dequantize(tensors, weight.shape, torch.float32) - weight.float()
            return (error.square() * importance).sum().item()

        alike, _ = choose_columns(subject, weight, torch.ones(_K))
        weighed, _ = choose_columns(subject, weight, importance)
        assert cost(weighed) < cost(alike)


def uneven_weight(dtype: torch.dtype) -> Tensor:
    """Return a weight `[24, 256]` whose columns differ in size; a row and a group of it are zero."""
    weight = torch.randn(_N, _K, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 3, _K)
    weight[3] = 0
    weight[5, 32:64] = 0
    return weight.to(dtype)


def file_bits(tensors: Mapping[str, Tensor]) -> float:
    """Return the number of bits that a weight takes in a file."""
    return 8 * encode_tensors(tensors).numel()


def choose_columns(form: Format, weight: Tensor, importance: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Choose codes as calibration does; return the tensors, and the values of the codes as they were chosen.

    The test is skipped if the format has no `columns`.
    """
    codes = form.columns(weight, importance)
    if codes is None:
        pytest.skip("no `columns`: calibration leaves this format as it is")
    assert isinstance(codes, ColumnCodes)
    columns, size = weight.float().t().contiguous(), codes.group_size
    for _ in range(9):
        values = []
        for column in range(weight.shape[1]):
            if size and column % size == 0:
                codes.begin_group(column // size, columns[column : column + size])
            values.append(codes.encode(column, columns[column]))
        if not codes.again(file_bits):
            return codes.tensors(), torch.stack(values, dim=1)
    pytest.fail("`again` asks for a tenth round")
