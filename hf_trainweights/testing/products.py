"""The contract of products. Subclass it in a module that pytest collects, and name the formats of the weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.kernels import linear, stored
from hf_trainweights.tensor.dispatch import FALLBACKS
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor
from hf_trainweights.testing.format_values import FormatSubjects
from hf_trainweights.testing.values import assert_close_product, assert_close_products, weight_with_outliers

every_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)


class ProductContract(FormatSubjects):
    """The promises of `F.linear` with quantized weights, by whatever way the machine multiplies them.

    Examples:
        >>> from hf_trainweights.formats.int8 import Int8
        >>> class TestProductsOfInt8(ProductContract):
        ...     formats = (Int8(),)
    """

    shapes: ClassVar[Sequence[tuple[int, int]]] = ((3, 192), (20, 1088))
    """Rows and columns of the weights; the columns are rounded up to a multiple of the format's `column_step`."""

    rows: ClassVar[Sequence[int]] = (1, 2, 3, 4, 5, 16, 49, 130)
    """The numbers of rows of x; name those on both sides of each threshold of a kernel."""

    def stored(self, subject: Format, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return stored tensors of a weight; override it for a format to which floats are not quantized."""
        return subject.quantize(weight_with_outliers(*shape, dtype=dtype))

    def weight(self, subject: Format, N: int = 20, K: int = 64, dtype: torch.dtype = torch.float32) -> QuantizedTensor:
        """Return a weight of about this shape."""
        step = subject.column_step
        shape = (N, -(-K // step) * step)
        return QuantizedTensor(self.stored(subject, shape, dtype), subject, shape, dtype)

    @every_dtype
    def test_products_are_as_exact_as_those_of_the_dequantized_weight(
        self, subject: Format, dtype: torch.dtype
    ) -> None:
        """The error is at most 1.5 times that of a product with the dequantized weight, rounded once.

        The product does not dequantize the whole weight.
        """
        FALLBACKS.clear()
        for N, K in self.shapes:
            weight = self.weight(subject, N, K, dtype)
            assert_close_products(self.product(weight), weight.dequantize(torch.float32), dtype, self.rows)
        assert not FALLBACKS, "the weight was dequantized as a whole"

    def product(self, weight: QuantizedTensor) -> Any:
        """Return the function of x and a bias that gives the product, for inference."""
        return torch.no_grad()(lambda x, bias: F.linear(x, weight, bias))

    @every_dtype
    def test_all_ways_to_a_product_give_equal_bits(self, subject: Format, dtype: torch.dtype) -> None:
        """A model computes the same with autograd and without, alone and in a batch, compiled and as an op."""
        weight, bias = self.weight(subject, dtype=dtype), weight_with_outliers(20, dtype=dtype)
        for rows in (3, 130):
            x = weight_with_outliers(rows, weight.shape[1], dtype=dtype)
            expected = self.product(weight)(x, bias)
            assert torch.equal(F.linear(x, weight, bias), expected)
            with torch.inference_mode():
                assert torch.equal(F.linear(x, weight, bias), expected)
                assert torch.equal(F.linear(x[None], weight, bias)[0], expected)
                assert torch.equal(torch.addmm(bias, x, weight.t()), expected)
            by_op = linear(x, weight.tensors, subject, bias)  # None: the op does not take this format
            assert by_op is None or torch.equal(by_op, expected)

    @every_dtype
    def test_batches_keep_their_dimensions(self, subject: Format, dtype: torch.dtype) -> None:
        """The result has the dimensions of x but for the last, also if x has no rows."""
        weight = self.weight(subject, dtype=dtype)
        for batch in ((), (2, 3), (0,), (2, 0), (1, 1, 1)):
            x = weight_with_outliers(*batch, weight.shape[1], dtype=dtype)
            assert self.product(weight)(x, None).shape == (*batch, 20)

    @every_dtype
    def test_the_memory_of_x_changes_no_bit(self, subject: Format, dtype: torch.dtype) -> None:
        """A product reads x by its strides, from any address."""
        weight = self.weight(subject, dtype=dtype)
        K, multiply = weight.shape[1], self.product(weight)
        for rows in (1, 5, 130):
            x = weight_with_outliers(rows, K, dtype=dtype)
            wide, shifted = torch.empty(2 * rows, 2 * K, dtype=dtype), torch.empty(rows * K + 1, dtype=dtype)
            views = (x.t().contiguous().t(), wide[::2, ::2].copy_(x), shifted[1:].view(rows, K).copy_(x))
            expected = multiply(x, None)
            assert all(torch.equal(multiply(view, None), expected) for view in views)

    @every_dtype
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_a_row_that_is_not_finite_shows_and_no_other_row_changes(
        self, subject: Format, value: float, dtype: torch.dtype
    ) -> None:
        """A token that is not finite shows in its own results, and changes no result of another token."""
        weight = self.weight(subject, dtype=dtype)
        for rows in (2, 4, 16, 65, 260):
            x = weight_with_outliers(rows, weight.shape[1], dtype=dtype)
            expected = self.product(weight)(x, None)
            x[1, 3] = value
            result = self.product(weight)(x, None)
            assert not result[1].isfinite().any()
            assert torch.equal(result[::2], expected[::2]), "another row has changed"

    @every_dtype
    def test_rows_of_any_size_keep_their_precision(self, subject: Format, dtype: torch.dtype) -> None:
        """Each row of x is rounded by its own magnitude, from near the smallest numbers to near the largest."""
        weight = self.weight(subject, dtype=dtype)
        size = 2.0**-6 if dtype == torch.float16 else 2.0**-60
        for rows in (1, 5, 70):
            sizes = torch.tensor([size, 1.0, 1 / size]).repeat(rows)[:rows, None]
            x = (weight_with_outliers(rows, weight.shape[1]) * sizes).to(dtype)
            result, exact = self.product(weight)(x, None), x.double() @ weight.dequantize(torch.float64).t()
            error = (result.double() - exact).norm(dim=1) / exact.norm(dim=1)
            assert error.max() <= (2e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps)
            assert not self.product(weight)(x * 0, None).any()

    def test_scales_of_another_dtype_than_x_are_used_as_they_are(self, subject: Format) -> None:
        """`weight.to(dtype)` changes the dtype of results and keeps the stored scales."""
        for stored_dtype, dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
            weight = self.weight(subject, dtype=stored_dtype).to(dtype)
            assert isinstance(weight, QuantizedTensor)
            dense = weight.dequantize(torch.float32)
            assert_close_products(self.product(weight), dense, dtype, (1, 5, 70))

    @every_dtype
    def test_the_gradient_of_x_keeps_the_bound(self, subject: Format, dtype: torch.dtype) -> None:
        """Adapters train through a quantized weight as through the float one."""
        weight = self.weight(subject, dtype=dtype)
        dense, exact = weight.dequantize(), weight.dequantize(torch.float64)
        for rows in (1, 5, 70):
            x = weight_with_outliers(rows, weight.shape[1], dtype=dtype).requires_grad_()
            upstream = weight_with_outliers(rows, 20, dtype=dtype, seed=3)
            F.linear(x, weight).backward(upstream)
            assert x.grad is not None
            assert_close_product(x.grad, upstream @ dense, upstream.double() @ exact)

    def test_the_op_passes_pytorchs_checks(self, subject: Format) -> None:
        """`torch.library.opcheck`: schema, fake tensors and autograd registration fit the results."""
        weight = self.weight(subject)
        if torch.float8_e4m3fn in {tensor.dtype for tensor in weight.tensors.values()}:
            pytest.skip("PyTorch's checks compute with the stored tensors, which it cannot do in float8")
        for rows in (0, 1, 70):
            x = weight_with_outliers(rows, weight.shape[1])
            arguments = (x, [*weight.tensors.values()], weight_with_outliers(20), stored.config_of(subject))
            torch.library.opcheck(stored.LINEAR, arguments)

    def test_one_graph_serves_all_numbers_of_rows(self, subject: Format) -> None:
        """torch.compile traces a product once."""
        weight, graphs = self.weight(subject), []

        def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
            del inputs
            graphs.append(graph)
            return graph.forward

        compiled = torch.compile(F.linear, fullgraph=True, dynamic=True, backend=backend)
        with torch.no_grad():
            for rows in (11, 23, 70):  # not the number of groups: torch.compile would give equal sizes one symbol
                x = weight_with_outliers(rows, weight.shape[1])
                assert torch.equal(compiled(x, weight), F.linear(x, weight))
        assert len(graphs) == 1
        torch._dynamo.reset()
