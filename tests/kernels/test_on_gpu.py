"""Quantized weights and caches on a GPU: products, compiled programs, CUDA graphs, attention and whole models."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from architectures import make_llama, random_ids
from stored_tokens import LIMITS, MASKS, SIZES, Sizes, attention_mask, expected, operands
from torch import Tensor
from transformers import PreTrainedModel
from weights import random_weight, stored_tensors

from hf_trainweights import KVCache, QuantizedTensor, TrainWeightsConfig, kernels, quantize_
from hf_trainweights.cache.layers import KVLayer
from hf_trainweights.formats.affine import Affine
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.table4 import Table4
from hf_trainweights.kernels import cuda, cuda_attention, cuda_driver
from hf_trainweights.testing.values import assert_close_product

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    # Compilers warn about what a GPU has and has not.
    pytest.mark.filterwarnings("default"),
]

every_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
every_form = pytest.mark.parametrize(
    "form", [Int8(), Int8(16), Int8(128), Int4(32), Int4(64), Int4(128), Int8(256)], ids=str
)


def on_gpu(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return random_weight(*shape, dtype=dtype, seed=seed).cuda()


def quantized(N: int, K: int, dtype: torch.dtype, form: Int8 | Int4) -> QuantizedTensor:
    return QuantizedTensor.quantize(on_gpu(N, K, dtype=dtype, seed=0), form)


def kernels_used(way: str, form: Format, dtype: torch.dtype) -> list[bool]:
    """Return the result of each check of a kernel."""
    return [right for case, right in cuda._CHECKED.items() if (case.way, case.form, case.dtype) == (way, form, dtype)]


@every_form
@every_dtype
@pytest.mark.parametrize(("N", "K"), [(80, 512), (33, 1280), (512, 2304), (4096, 4096)])
def test_products_keep_the_bound(N: int, K: int, dtype: torch.dtype, form: Int8 | Int4) -> None:
    weight, bias = quantized(N, K, dtype, form), on_gpu(N, dtype=dtype, seed=2)
    for M in (1, 2, 8, 9, 16, 17, 33, 64, 130, 600):
        x = on_gpu(M, K, dtype=dtype)
        with torch.no_grad():
            result = F.linear(x, weight, bias)
            exact = F.linear(x.double(), weight.dequantize(torch.float64), bias.double())
            assert_close_product(result, F.linear(x, weight.dequantize(), bias), exact)
            assert torch.equal(F.linear(x, weight, bias), result)
            # As one op, as compilers see it.
            assert torch.equal(kernels.linear(x, weight.tensors, form, bias), result)
    used = {way: kernels_used(way, form, dtype) for way in ("few_rows", "row", "tiles", "dequantize")}
    assert all(all(right) for right in used.values()), used
    assert used["dequantize"]
    assert used["row" if dtype == torch.float32 else "tiles"]
    if dtype != torch.float32 and cuda_driver.is_available():
        assert len(used["few_rows"]) >= 2


@every_form
@pytest.mark.parametrize("M", [1, 5, 40])
def test_inputs_may_begin_anywhere(M: int, form: Int8 | Int4) -> None:
    weight = quantized(80, 512, torch.bfloat16, form)
    x, bias = on_gpu(M, 512, dtype=torch.bfloat16), on_gpu(80, dtype=torch.bfloat16, seed=2)
    memory = torch.empty(M * 512 + 8, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        exact = F.linear(x.double(), weight.dequantize(torch.float64), bias.double())
        dense = F.linear(x, weight.dequantize(), bias)
        # Addresses that are multiples of 16 bytes and others in turn, the former by what Triton compiled before.
        for offset in (0, 1, 0, 2, 8, 1):
            placed = memory[offset : offset + M * 512].view(M, 512).copy_(x)
            assert_close_product(F.linear(placed, weight, bias), dense, exact)
            assert_close_product(F.linear(placed, weight) + bias, dense, exact)


@every_dtype
@pytest.mark.parametrize("K", [1, 33, 257, 1000])
def test_columns_need_not_fill_a_block(K: int, dtype: torch.dtype) -> None:
    weight = quantized(70, K, dtype, Int8())
    for M in (1, 5, 70):
        x = on_gpu(2 * M, 2 * K, dtype=dtype)[::2, ::2]
        exact = x.double() @ weight.dequantize(torch.float64).t()
        assert_close_product(F.linear(x, weight), F.linear(x, weight.dequantize()), exact)


@every_form
@every_dtype
def test_weights_are_dequantized_bit_for_bit(dtype: torch.dtype, form: Int8 | Int4) -> None:
    weight = quantized(70, 1280, dtype, form)
    made = cuda.dequantize_rows(weight.tensors, form, 1280, dtype)
    assert made is not None
    assert torch.equal(made, form.dequantize_rows(weight.tensors, 1280, dtype))


@every_form
def test_gradients_are_those_of_the_dequantized_weight(form: Int8 | Int4) -> None:
    weight, gradient = quantized(80, 512, torch.float32, form), on_gpu(40, 80, dtype=torch.float32, seed=3)
    x = on_gpu(40, 512, dtype=torch.float32).requires_grad_()
    F.linear(x, weight).backward(gradient)
    assert x.grad is not None
    assert torch.allclose(x.grad, gradient @ weight.dequantize(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 17, 600])
@every_dtype
def test_int8_activations_are_those_of_the_cpu(dtype: torch.dtype, rows: int) -> None:
    weight, x = quantized(80, 96, dtype, Int8(activations="int8")), on_gpu(rows, 96, dtype=dtype)
    result, expected = F.linear(x, weight).cpu().double(), F.linear(x.cpu(), weight.cpu()).double()
    # A single row meets the kernel that leaves it as it is.
    bound = torch.finfo(dtype).eps if rows > 1 else 0.02
    assert (result - expected).norm() <= bound * expected.norm()
    assert all(kernels_used("integers", Int8(activations="int8"), dtype))


@pytest.mark.parametrize(
    "form",
    [
        *(Float8E4M3(), Float8E4M3(128), Float8E4M3(32, "e8m0"), Affine(4, 128), Affine(4, 64, offset="bias")),
        *(Affine(4, None), Affine(4, 32, "k4", "none"), Table4(32, "e8m0"), Table4(16, "e4m3"), Table4(64, "nested")),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_few_rows_meet_the_formats_of_other_programs(form: Format, dtype: torch.dtype) -> None:
    tensors = {name: tensor.cuda() for name, tensor in stored_tensors(form, (130, 2304), dtype).items()}
    for M in (1, 7, 16, 40):
        x, bias = on_gpu(M, 2304, dtype=dtype), on_gpu(130, dtype=dtype, seed=2)
        exact = F.linear(x.double(), form.dequantize(tensors, (130, 2304), torch.float64), bias.double())
        result = kernels.linear(x, tensors, form, bias)
        assert result is not None
        assert_close_product(result, F.linear(x, form.dequantize(tensors, (130, 2304), dtype), bias), exact)
    if cuda_driver.is_available():
        assert kernels_used("few_rows", form, dtype) == [True, True]


@pytest.mark.parametrize("form", [Int4(128), Int8(), Table4(32, "e8m0")], ids=str)
@pytest.mark.parametrize("counts", [[0, 3, 0, 5], [40, 0, 300, 1]], ids=str)
def test_experts_are_multiplied_without_waiting_for_the_gpu(form: Format, counts: list[int]) -> None:
    tensors = {name: tensor.cuda() for name, tensor in stored_tensors(form, (4, 512, 1024), torch.bfloat16).items()}
    x, ends = on_gpu(sum(counts), 1024, dtype=torch.bfloat16), torch.tensor(counts).cumsum(0).to(torch.int32).cuda()
    weights = form.dequantize(tensors, (4, 512, 1024), torch.float64)
    exact = torch.cat([rows.double() @ weight.t() for rows, weight in zip(x.split(counts), weights, strict=True)])
    kernels.multiply_experts(x, tensors, form, ends)  # checks the kernel
    if not cuda_driver.is_available():
        pytest.skip("needs NVRTC")
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = kernels.multiply_experts(x, tensors, form, ends)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (result.double() - exact).norm() <= torch.finfo(torch.bfloat16).eps * exact.norm()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernels.multiply_experts(x, tensors, form, ends)
    graph.replay()
    assert torch.equal(captured, result)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs float8 products"
)
@pytest.mark.parametrize("rows", [1, 17, 600])
def test_float8_activations_are_those_of_the_cpu(rows: int) -> None:
    form = Float8E4M3(activations="float8")
    weight = QuantizedTensor.quantize(on_gpu(80, 96, dtype=torch.bfloat16, seed=0), form)
    x = on_gpu(rows, 96, dtype=torch.bfloat16)
    result, expected = F.linear(x, weight).cpu().double(), F.linear(x.cpu(), weight.cpu()).double()
    # Few rows are left as they are.
    bound = torch.finfo(torch.bfloat16).eps if rows > 16 else 0.05
    assert (result - expected).norm() <= bound * expected.norm()
    assert rows == 1 or all(kernels_used("float8", form, torch.bfloat16))


@every_form
@pytest.mark.parametrize("M", [1, 5, 600])
def test_a_compiled_program_gives_the_same(M: int, form: Int8 | Int4) -> None:
    weight, x = quantized(80, 256, torch.bfloat16, form), on_gpu(M, 256, dtype=torch.bfloat16)
    compiled = torch.compile(lambda v, w: F.linear(v, w), fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(x, weight), F.linear(x, weight))
    torch._dynamo.reset()


@every_form
@pytest.mark.parametrize("known", [True, False])
def test_a_captured_graph_gives_the_same(known: bool, form: Int8 | Int4, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_CHECKED", {})
    weight, x = quantized(80, 256, torch.bfloat16, form), on_gpu(1, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        warm = F.linear(x, weight) if known else F.linear(x, weight.dequantize())
        # What runs for the first time while it is captured may ask for memory of its own.
        weight.dequantize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = F.linear(x, weight)
        assert bool(cuda._CHECKED) == known
        graph.replay()
        assert_close_product(out, warm, x.double() @ weight.dequantize(torch.float64).t())


@pytest.mark.parametrize("format_name", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_model_generates_what_its_dequantized_copy_does(dtype: torch.dtype, format_name: str) -> None:
    options = {"group_size": 64} if format_name == "int4" else {}
    model = make_llama().to(dtype).cuda().eval()
    quantize_(model, TrainWeightsConfig(format_name, **options))
    plain = copy.deepcopy(model)
    assert isinstance(plain, PreTrainedModel)
    plain.dequantize()
    ids = random_ids().cuda()
    tokens = model.generate(ids, max_new_tokens=5, do_sample=False)
    assert tokens.shape == (len(ids), ids.shape[1] + 5)
    with torch.no_grad():
        result, expected = model(tokens).logits.double(), plain(tokens).logits.double()
    assert (result - expected).norm() <= 8 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("sizes", [*SIZES, Sizes(1, 8, 4, 1, 128, 128, 5000)], ids=str)
@pytest.mark.parametrize("bits", [(8, 8), (8, 4), (4, 8), (4, 4)], ids=str)
@every_dtype
def test_attention_is_that_to_dequantized_tokens(sizes: Sizes, bits: tuple[int, int], dtype: torch.dtype) -> None:
    query, keys, values = operands(sizes, dtype, bits)
    tokens = slice(sizes.first, sizes.tokens)
    keys_on_gpu, values_on_gpu = copy.copy(keys), copy.copy(values)
    for stored in (keys_on_gpu, values_on_gpu):
        stored.codes, stored.scale = stored.codes.cuda(), stored.scale.cuda()
        stored.channels = None if stored.channels is None else stored.channels.cuda()
    for kind in MASKS:
        mask = attention_mask(kind, sizes, dtype)
        mask_on_gpu = None if mask is None else mask.cuda()
        for _ in range(2):
            out = cuda_attention.attend(query.cuda(), keys_on_gpu, values_on_gpu, tokens, 0.2, mask_on_gpu)
            assert out is not None
            reference = expected(query, keys, values, tokens, mask)
            assert (out.cpu().float() - reference).norm() <= LIMITS[dtype] * reference.norm()


@pytest.mark.parametrize("kinds", [("int8", "int8"), ("int8", "int4"), ("int4", "int4")], ids=str)
def test_a_token_is_stored_and_read_without_waiting_for_the_gpu(kinds: tuple[str, str]) -> None:
    layer, states = KVLayer(*kinds), torch.randn(1, 2, 500, 64, device="cuda").bfloat16()
    query = torch.randn(1, 8, 1, 64, device="cuda").bfloat16()
    layer.update(states, states)

    def step() -> Tensor:
        keys, values = layer.update(states[:, :, :1], states[:, :, :1])
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    step()  # checks the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        outs = [step() for _ in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert outs[-1].isfinite().all()


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_generates_with_a_small_cache(kind: str, compiled: bool) -> None:
    model, ids = make_llama().bfloat16().cuda().eval(), torch.randint(0, 100, (2, 80), device="cuda")
    cache = KVCache(model.config, kind)
    forward = torch.compile(model.forward) if compiled else model.forward
    with torch.no_grad():
        forward(input_ids=ids, past_key_values=cache)
        steps = [forward(input_ids=ids[:, column : column + 1], past_key_values=cache).logits for column in range(3)]
        exact = model(torch.cat([ids, ids[:, :3]], 1)).logits[:, -1:]
    assert (steps[-1] - exact).norm() <= (0.1 if kind == "int4" else 0.02) * exact.norm()
    torch._dynamo.reset()
