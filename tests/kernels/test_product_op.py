"""The op of compiled programs gives the bits of F.linear, and runs no Python."""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import by_default
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from weights import FORMS, random_weight, weight_of

from hf_trainweights import QuantizedTensor
from hf_trainweights.formats import get_format
from hf_trainweights.formats.base import Format
from hf_trainweights.kernels import compiled, product_op

pytestmark = pytest.mark.skipif(
    "False" in product_op.describe().rpartition(",")[2], reason="the op is not compiled, or PyTorch lacks a function"
)

CASES: dict[str, Format] = {name: form for name, form in FORMS.items() if compiled.serves(form)}
CASES["int8_activations"] = get_format({"format": "int8", "activations": "int8"})
CASES["affine_k4"] = get_format({"format": "affine", "bits": 4, "group_size": 32, "scales": "k4", "offset": "none"})
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantized(form: str, dtype: torch.dtype, N: int = 96, K: int = 128) -> QuantizedTensor:
    return weight_of(CASES[form], (N, K), dtype)


def call(x: Tensor, weight: QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """Call the op as a compiled program does."""
    form = weight.format
    product = compiled.find(form, *form.shape_of(weight.qdata), weight.dtype, weight.scale_dtype)
    assert product is not None
    assert product_op.serves(product)
    qdata, scale, *others = (weight.tensors[name] for name in form.tensor_names)
    biases = () if bias is None else (bias,)
    op, arguments = product_op.bind(product, others, bool(biases))
    return op(x, qdata, scale, *biases, *arguments)


@pytest.mark.parametrize("dtype", by_default((torch.bfloat16,), DTYPES), ids=str)
@pytest.mark.parametrize("form", CASES)
def test_the_op_gives_the_bits_of_the_product(form: str, dtype: torch.dtype) -> None:
    K = 256 if form == "affine_k4" else 128
    weight, bias = quantized(form, dtype, K=K), random_weight(96, 1, dtype=dtype).flatten()
    for shape in ((1, K), (2, 3, K), (K,), (0, K)):
        x = torch.randn(shape).to(dtype)
        for each in (None, bias):
            with torch.no_grad():
                assert torch.equal(call(x, weight, each), F.linear(x, weight, each))


def targets(weight: Any, x: Tensor, dynamic: bool | None = None) -> set[str]:
    """Return the names of the ops of the program that multiplies with a weight."""
    layer = nn.Linear(*reversed(weight.shape), bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    found: set[str] = set()

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        def collect(lowered: torch.fx.GraphModule, _: Any) -> Any:
            found.update(str(node.target) for node in lowered.graph.nodes if node.op == "call_function")
            return lowered.forward

        return aot_autograd(fw_compiler=collect)(graph, inputs)

    with torch.no_grad():
        compiled_layer = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=backend)
        assert torch.equal(compiled_layer(x), layer(x))
    return found


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function:UserWarning")
@pytest.mark.parametrize("dynamic", [None, True])
def test_programs_call_the_op(dynamic: bool | None) -> None:
    torch._dynamo.reset()
    weight = quantized("int8", torch.float32)
    assert "hf_trainweights.bare_product.default" in targets(weight, torch.randn(3, 128), dynamic)


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function:UserWarning")
def test_a_program_of_more_rows_than_the_product_serves_calls_the_op_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    weight = quantized("int8", torch.bfloat16)
    product = compiled.find(weight.format, 96, 128, torch.bfloat16, torch.bfloat16)
    assert product is not None
    monkeypatch.setattr(product, "most_rows", 4)
    for rows, name in ((4, "hf_trainweights.bare_product.default"), (5, "hf_trainweights.linear.default")):
        assert name in targets(weight, torch.randn(rows, 128).bfloat16())


def test_the_op_traces_and_its_arguments_are_checked() -> None:
    weight, x = quantized("int8", torch.bfloat16), torch.randn(2, 128).bfloat16()
    call(x, weight)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert call(x, weight).shape == (2, 96)
    freed = x.clone()
    freed.untyped_storage().resize_(0)
    for wrong in (x.float(), x[:, :64], x.t().contiguous().t(), freed):
        with pytest.raises(RuntimeError, match="has another shape or dtype than the program was compiled for, or its"):
            call(wrong, weight)
    with pytest.raises(RuntimeError, match="has another shape or dtype"):
        call(x, weight, x[0, :64].contiguous())


def test_the_op_runs_in_threads_of_their_own() -> None:
    weight, x = quantized("int4_g32", torch.bfloat16), torch.randn(40, 128).bfloat16()
    outs: list[Tensor] = []
    threads = [threading.Thread(target=lambda: outs.append(call(x, weight))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outs) == 4
    assert all(torch.equal(out, call(x, weight)) for out in outs)


def note_call(calls: list[str], frame: Any, event: str, argument: object) -> None:
    del argument
    if event == "call":
        calls.append(frame.f_code.co_filename)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8", "int4_g32", "affine_g32"])
def test_a_compiled_step_makes_as_many_python_calls_as_in_float(form: str) -> None:
    torch.manual_seed(0)
    layers: Any = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3))).requires_grad_(False)
    counts, x = [], torch.randn(1, 64)
    for _ in range(2):
        torch._dynamo.reset()
        program = torch.compile(layers, fullgraph=True)
        calls: list[str] = []
        with torch.no_grad():
            for _ in range(3):
                program(x)
            sys.setprofile(functools.partial(note_call, calls))
            program(x)
            sys.setprofile(None)
        counts.append(len(calls))
        assert not any("hf_trainweights" in name for name in calls)
        for layer in layers:
            weight = QuantizedTensor.quantize(layer.weight, CASES[form])
            layer.weight = nn.Parameter(weight, requires_grad=False)
    assert counts[1] <= counts[0] * 1.2
