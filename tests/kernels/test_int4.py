"""Products with int4 weights: as close to the exact result as dequantizing is, on every path."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers import assert_close_product
from torch import Tensor
from torch.nn import functional as F

from hf_trainweights import kernels
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.kernels import stored
from hf_trainweights.tensor.dispatch import FALLBACKS
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# PyTorch's own ops are the subject here: test_compiled.py tests the compiled products.
pytestmark = pytest.mark.usefixtures("without_compiled")

# Few rows and many.
M_VALUES = (1, 5, 70)
SHAPES = [(64, 32, 32), (192, 192, 64), (320, 256, 128)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight_of(shape: tuple[int, int, int], dtype: torch.dtype) -> QuantizedTensor:
    """Return a weight with scales of both signs."""
    N, K, group_size = shape
    weight = QuantizedTensor.quantize(random(N, K, dtype=dtype, seed=1), Int4(group_size))
    assert {-1.0, 1.0} <= set(weight.scale.sign().unique().tolist())
    return weight


def error(result: Tensor, exact: Tensor) -> float:
    return ((result.double() - exact).norm() / exact.norm()).item()


def floor(x: Tensor, weight: QuantizedTensor, exact: Tensor, bias: Tensor | None = None) -> float:
    """Return the error of the product with the dequantized weight, in which all is rounded once."""
    return error(F.linear(x, weight.dequantize(), bias), exact)


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_as_exact_as_dequantizing(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    weight, bias = weight_of(shape, dtype), random(shape[0], dtype=dtype)
    for M in M_VALUES:
        x = random(M, shape[1], dtype=dtype, seed=100 + M)
        for added in (None, bias):
            exact = F.linear(x.double(), weight.dequantize(torch.float64), None if added is None else added.double())
            result = kernels.linear(x, weight.tensors, weight.format, added)
            assert result is not None
            assert (result.dtype, result.shape) == (dtype, exact.shape)
            assert error(result, exact) <= 1.5 * floor(x, weight, exact, added), M


def test_weights_of_many_blocks_are_put_together_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = weight_of((320, 256, 128), torch.bfloat16), random(40, 256)
    whole = kernels.linear(x, weight.tensors, weight.format)
    monkeypatch.setattr(stored, "_BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(stored, "_BLOCK_ROWS", 128)
    torch.testing.assert_close(kernels.linear(x, weight.tensors, weight.format), whole)


@pytest.mark.parametrize("M", [6, 60])
def test_strides_and_batch_dimensions_change_nothing(M: int) -> None:
    weight = weight_of((192, 192, 64), torch.bfloat16)
    x = random(M, 192)
    expected = F.linear(x, weight)
    wide = random(M, 400)
    wide[:, 7:391:2] = x
    for same in (x.t().contiguous().t(), wide[:, 7:391:2], x.flip(0).flip(0)):
        assert torch.equal(F.linear(same, weight), expected)
    assert torch.equal(F.linear(x.view(2, -1, 1, 192), weight), expected.view(2, -1, 1, 192))
    one = F.linear(x[0], weight)
    assert one.shape == (192,)
    torch.testing.assert_close(one, expected[0], rtol=0.02, atol=0.05)
    for empty in ((0, 192), (2, 0, 192)):
        assert F.linear(x.new_empty(empty), weight).shape == (*empty[:-1], 192)


@pytest.mark.parametrize("M", [3, 60])
def test_the_gradient_of_x_keeps_the_bound(M: int) -> None:
    weight = weight_of((192, 192, 64), torch.bfloat16)
    x, upstream = random(M, 192).requires_grad_(), random(M, 192, seed=2)
    F.linear(x, weight).backward(upstream)
    assert x.grad is not None
    exact = upstream.double() @ weight.dequantize(torch.float64)
    assert_close_product(x.grad, upstream @ weight.dequantize(), exact)


def test_linear_takes_the_op_and_does_not_dequantize_the_whole_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = weight_of((64, 32, 32), torch.bfloat16), random(2, 32)
    monkeypatch.setattr(Int4, "dequantize", None)
    FALLBACKS.clear()
    for inference in (False, True):
        with torch.inference_mode(inference):
            assert F.linear(x, weight).shape == (2, 64)
    assert not FALLBACKS


def test_what_is_no_float_of_the_cpu_has_no_op() -> None:
    weight = weight_of((64, 32, 32), torch.float32)
    assert kernels.linear(random(2, 32).double(), weight.tensors, weight.format) is None
    assert kernels.linear(random(2, 32).to("meta"), weight.tensors, weight.format) is None


@pytest.mark.parametrize("M", [1, 5, 70])
def test_scales_that_x_cannot_hold_are_used_as_they_are(M: int) -> None:
    weight, x = weight_of((64, 32, 32), torch.float32), random(M, 32)
    result = kernels.linear(x, weight.tensors, weight.format)
    exact = F.linear(x.double(), weight.dequantize(torch.float64))
    assert error(result, exact) <= 1.5 * floor(x, weight.bfloat16(), exact)


@pytest.mark.slow
@pytest.mark.parametrize("M", [2, 40])
def test_the_ops_are_well_behaved(M: int) -> None:
    weight = weight_of((64, 64, 32), torch.bfloat16)
    for bias in (None, random(64)):
        torch.library.opcheck(
            stored.LINEAR, (random(M, 64), [weight.qdata, weight.scale], bias, stored.config_of(weight.format))
        )


@pytest.mark.slow
def test_products_compile_whole() -> None:
    weight, bias = weight_of((64, 64, 32), torch.bfloat16), random(64)

    def model(x: Tensor) -> Tensor:
        return F.linear(F.linear(x, weight, bias).relu(), weight)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for M in (3, 40):
        with torch.no_grad():
            assert torch.equal(compiled(random(M, 64)), model(random(M, 64)))
