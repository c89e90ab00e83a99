"""Products of rows with their experts, as one op that compilers keep."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from emulated_gpu import emulated_gpu, kernel_cache, needs_compiler
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from weights import FORMS, KINDS, random_weight, stored_tensors

from hf_trainweights import QuantizedTensor
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.kernels import cuda, experts, multiply_experts

__all__ = ["emulated_gpu", "kernel_cache"]  # fixtures

ENDS = torch.tensor([0, 3, 3, 7], dtype=torch.int32)


def exact_products(x: Tensor, tensors: dict[str, Tensor], form: Format, N: int) -> Tensor:
    weight = form.dequantize(tensors, (len(ENDS), N, x.shape[-1]), torch.float64)
    parts = x[: ENDS[-1]].double().tensor_split(ENDS[:-1].long())
    return torch.cat([part @ matrix.t() for part, matrix in zip(parts, weight, strict=True)])


@pytest.mark.parametrize("form", [FORMS[name] for name in KINDS], ids=str)
def test_rows_meet_their_experts_in_every_kind_of_format(form: Format) -> None:
    tensors, x = stored_tensors(form, (4, 6, 256), torch.float32), random_weight(9, 256, seed=1)
    result = multiply_experts(x, tensors, form, ENDS)
    exact = exact_products(x, tensors, form, 6)
    assert (result[:7].double() - exact).norm() <= 1e-5 * exact.norm()
    # Rows behind the last expert's are 0.
    assert not result[7:].any()


def test_a_compiler_keeps_one_op_and_no_float_weight() -> None:
    weight = QuantizedTensor.quantize(random_weight(4, 16, 128).bfloat16(), Int4(32))
    module = nn.Module()
    module.experts = nn.Parameter(weight, requires_grad=False)

    def multiply(x: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, module.experts.mT, offs=ends)

    x = random_weight(7, 128, seed=1).bfloat16()
    with torch.no_grad():
        graph = make_fx(multiply, tracing_mode="fake", _allow_non_fake_inputs=True)(x, ENDS)
        called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        assert experts.EXPERTS in called
        assert torch.ops.aten._grouped_mm.default not in called
        assert torch.equal(graph(x, ENDS), multiply(x, ENDS))


@pytest.mark.slow
def test_a_compiled_program_gives_the_same() -> None:
    weight, x = QuantizedTensor.quantize(random_weight(4, 16, 128).bfloat16(), Int8()), random_weight(7, 128).bfloat16()
    compiled = torch.compile(lambda x, w, ends: torch._grouped_mm(x, w.mT, offs=ends), fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x, weight, ENDS), torch._grouped_mm(x, weight.mT, offs=ENDS))
    torch._dynamo.reset()


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("is_broken", [False, True])
def test_a_gpu_multiplies_all_experts_by_one_launch_once_it_is_right(
    is_broken: bool, emulated_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda, "_CHECKED", {})
    monkeypatch.setattr(cuda, "_CHOSEN", {})
    monkeypatch.setattr(cuda, "_has_driver", lambda index: True)
    monkeypatch.setattr(cuda, "capability", lambda index: (9, 0))
    emulated_gpu.driver.failure = 700 if is_broken else 0
    form = Int4(32)
    tensors, x = stored_tensors(form, (4, 20, 256), torch.bfloat16), random_weight(7, 256, seed=1).bfloat16()
    with caplog.at_level(logging.WARNING):
        result = cuda.multiply_experts(x, tensors, form, ENDS)
    if is_broken:
        assert result is None
        assert "The kernel `few_rows` for int4 g32" in caplog.text
        return
    exact = exact_products(x, tensors, form, 20)
    assert result is not None
    assert (result.double() - exact).norm() <= torch.finfo(torch.bfloat16).eps * exact.norm()
    checks = len(emulated_gpu.driver.launched) - 1
    assert torch.equal(cuda.multiply_experts(x, tensors, form, ENDS), result)
    assert len(emulated_gpu.driver.launched) == checks + 2


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("form", [Int4(128), Int8(), FORMS["table4_nested"], FORMS["float8_e8m0"]], ids=str)
def test_a_check_passes_where_the_kernel_is_right(
    form: Format, emulated_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_CHECKED", {})
    monkeypatch.setattr(cuda, "_CHOSEN", {})
    monkeypatch.setattr(cuda, "_has_driver", lambda index: True)
    monkeypatch.setattr(cuda, "capability", lambda index: (9, 0))
    tensors, x = stored_tensors(form, (20, 256), torch.bfloat16), random_weight(3, 256, seed=1).bfloat16()
    result = cuda.linear(x, tensors, None, form)
    exact = x.double() @ form.dequantize(tensors, (20, 256), torch.float64).t()
    assert result is not None
    assert (result.double() - exact).norm() <= torch.finfo(torch.bfloat16).eps * exact.norm()
    assert list(cuda._CHECKED.values()) == [True]
