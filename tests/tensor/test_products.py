"""`F.linear` without a gradient or in autocast: all that is not its plain case, by the value of the float weight."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from cpus import AMX, GENOA, use_cpu, use_library
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from weights import FORMS as ALL_FORMS
from weights import quantized_weight, random_weight

from hf_trainweights import QuantizedTensor, kernels
from hf_trainweights.formats import get_format
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.codebook4 import Codebook4
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.tensor import products
from hf_trainweights.tensor.dispatch import HANDLERS
from hf_trainweights.tensor.held_tensor import Held

N, K = 48, 64
FORMS = {
    "int8": Int8(),
    "int4": Int4(32),
    "uint4": get_format({"format": "uint4"}),
    "float8": get_format({"format": "float8_e4m3"}),
    "column_scale": get_format({"format": "int8", "column_scale": True}),
}


@pytest.fixture(params=["compiled", "not compiled"], autouse=True)
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply at once where a library does it, and by way of PyTorch's dispatcher where there is none."""
    use_cpu(GENOA, monkeypatch)
    if request.param == "not compiled":
        use_library(None, monkeypatch)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def quantized(form: Format | None = None, dtype: torch.dtype = torch.float32, seed: int = 0) -> QuantizedTensor:
    return QuantizedTensor.quantize(random_weight(N, K, dtype=dtype, seed=seed), form or Int8())


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return random_weight(*(shape or (3, K)), dtype=dtype, seed=1)


def assert_same(result: Tensor, expected: Tensor) -> None:
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    error = (result.double() - expected.double()).norm()
    assert error <= max(1e-6, 4 * torch.finfo(result.dtype).eps) * expected.double().norm()


def assert_like_dense(multiply: Callable[[Tensor], Tensor], weight: QuantizedTensor) -> None:
    """Check that a function gives the same, or the same kind of error, with a quantized weight and a float one."""
    F.linear(inputs(dtype=weight.dtype), weight)  # what a weight prepares for its products is there
    expected, refused = result_or_error(multiply, weight.dequantize())
    result, error = result_or_error(multiply, weight)
    assert isinstance(error, type(refused))
    if expected is not None and result is not None:
        assert_same(result, expected)


def result_or_error(
    multiply: Callable[[Tensor], Tensor], weight: Tensor
) -> tuple[Tensor, None] | tuple[None, RuntimeError]:
    try:
        return multiply(weight), None
    except RuntimeError as error:
        return None, error


# What x may be


X: dict[str, Callable[[], Tensor]] = {
    "a row": lambda: inputs(K),
    "a batch": lambda: inputs(2, 3, K),
    "no rows": lambda: inputs(0, K),
    "a batch without rows": lambda: inputs(2, 0, K),
    "columns in memory": lambda: inputs(K, 3).t(),
    "every other column": lambda: inputs(3, 2 * K)[:, ::2],
    "an offset": lambda: inputs(4, K)[1:],
    "one row, repeated": lambda: inputs(1, K).expand(5, K),
    "another K": lambda: inputs(3, K // 2),
    "another K of as many elements": lambda: inputs(6, K // 2),
    "no dimension": lambda: torch.tensor(1.0),
    "another dtype": lambda: inputs().bfloat16(),
    "float64": lambda: inputs().double(),
    "integers": lambda: inputs().int(),
    "negated in a view": lambda: torch._neg_view(inputs()),
    "the imaginary part of a conjugate": lambda: torch.complex(inputs(), inputs()).conj().imag,
    "a tensor for oneDNN": lambda: inputs().to_mkldnn().to_dense(),
    "another device": lambda: inputs().to("meta"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", X)
def test_x_is_taken_as_by_a_float_weight(case: str) -> None:
    for form in FORMS.values():
        x, weight = X[case](), quantized(form)
        if not x.is_meta:
            assert_like_dense(lambda w, x=x: F.linear(x, w), weight)
            continue
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            _ = F.linear(x, weight).tolist()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_multiplied_part_by_part() -> None:
    nested = torch.nested.nested_tensor([inputs(2, K), inputs(1, K)], layout=torch.strided)
    weight = quantized()
    for result, part in zip(F.linear(nested, weight).unbind(), nested.unbind(), strict=True):
        assert_same(result, F.linear(part, weight.dequantize()))


# What a bias may be


BIAS: dict[str, Callable[[], Tensor]] = {
    "a bias": lambda: inputs(N),
    "a parameter": lambda: nn.Parameter(inputs(N)),
    "every other number": lambda: inputs(2 * N)[::2],
    "one number": lambda: inputs(1),
    "one number, repeated": lambda: inputs(1).expand(N),
    "no dimension": lambda: torch.tensor(1.0),
    "one too few": lambda: inputs(N - 1),
    "one too many": lambda: inputs(N + 1),
    "a row each": lambda: inputs(3, N),
    "another dtype": lambda: inputs(N).bfloat16(),
    "float64": lambda: inputs(N).double(),
    "negated in a view": lambda: torch._neg_view(inputs(N)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BIAS)
def test_a_bias_is_taken_as_by_a_float_weight(case: str) -> None:
    bias = BIAS[case]()
    for form in FORMS.values():
        assert_like_dense(lambda w: F.linear(inputs(), w, bias), quantized(form))


@pytest.mark.slow
@pytest.mark.parametrize("case", BIAS)
def test_addmm_takes_a_bias_as_of_a_float_weight(case: str) -> None:
    bias = BIAS[case]()
    assert_like_dense(lambda w: torch.addmm(bias, inputs(), w.t()), quantized())


# What the weight may be


WEIGHTS: dict[str, Callable[[Any], Any]] = {
    "square and transposed": lambda w: w[:, :N].t() if isinstance(w, Tensor) else w,
    "some of its rows": lambda w: w[::2],
    "a parameter": lambda w: nn.Parameter(w, requires_grad=False),
    "detached": lambda w: w.detach(),
    "its transpose's transpose": lambda w: w.t().t(),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_views_of_a_weight_multiply_as_those_of_a_float_weight(case: str) -> None:
    def multiply(weight: Tensor) -> Tensor:
        view = WEIGHTS[case](weight)
        return F.linear(inputs(3, view.shape[1]), view)

    assert_like_dense(multiply, quantized())


def test_a_square_weight_and_its_transpose_are_told_apart() -> None:
    weight = QuantizedTensor.quantize(random_weight(K, K), Int8())
    for _ in range(2):
        for view in (weight, weight.t()):
            assert_same(F.linear(inputs(), view), F.linear(inputs(), view.dequantize()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_weight_in_another_dtype_than_its_scales_multiplies(dtype: torch.dtype) -> None:
    weight = quantized()
    F.linear(inputs(), weight)
    assert_same(
        F.linear(inputs(dtype=dtype), weight.to(dtype)), F.linear(inputs(dtype=dtype), weight.to(dtype).dequantize())
    )


# Who watches


class Seen(TorchDispatchMode):
    """Notes the ops."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func.name())
        return func(*args, **(kwargs or {}))


def dispatch_mode(weight: Tensor) -> Tensor:
    with Seen() as seen:
        result = F.linear(inputs(), weight)
    assert any("linear" in name or "mm" in name for name in seen.ops)
    return result


def jvp(weight: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(inputs(), torch.ones(3, K))
        tangent = forward_ad.unpack_dual(F.linear(dual, weight)).tangent
    assert tangent is not None
    return tangent


def autocast(weight: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(inputs(), weight)


def gradient(weight: Tensor) -> Tensor:
    x = inputs().requires_grad_()
    with torch.enable_grad():
        F.linear(x, weight).sum().backward()
    assert x.grad is not None
    return x.grad


WATCHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "vmap": lambda w: torch.vmap(lambda row: F.linear(row, w))(inputs()),
    "vmap over a bias": lambda w: torch.vmap(lambda bias: F.linear(inputs(), w, bias))(inputs(2, N)),
    "torch.func.jvp": lambda w: torch.func.jvp(lambda x: F.linear(x, w), (inputs(),), (torch.ones(3, K),))[1],
    "a dual number": jvp,
    "autocast": autocast,
    "a dispatch mode": dispatch_mode,
    "autograd": gradient,
    "inference mode": lambda w: torch.inference_mode()(lambda: F.linear(inputs(), w))(),
    "a compiler": lambda w: torch.compile(lambda x: F.linear(x, w), fullgraph=True, backend="eager")(inputs()),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # PyTorch's own, when the first tangent is computed
@pytest.mark.parametrize("case", WATCHERS)
def test_who_watches_sees_what_a_float_weight_would_show(case: str) -> None:
    assert_like_dense(WATCHERS[case], quantized())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_each_watcher_alone_keeps_the_product_from_being_computed_at_once() -> None:
    assert not products._is_watched()
    seen: dict[str, bool] = {}

    def note(name: str) -> Callable[[Tensor], Tensor]:
        def noted(x: Tensor) -> Tensor:
            seen[name] = products._is_watched()
            return x

        return noted

    torch.vmap(note("vmap"))(inputs())
    with forward_ad.dual_level():
        note("dual")(inputs())
    with torch.autocast("cpu", torch.bfloat16):
        note("autocast")(inputs())
    with Seen():
        note("mode")(inputs())
    with torch.enable_grad():
        note("grad")(inputs())
    assert seen == dict.fromkeys(("vmap", "dual", "autocast", "mode", "grad"), True)


# A weight that takes other tensors


def _load_state_dict(weight: QuantizedTensor, other: QuantizedTensor) -> None:
    layer = nn.Linear(K, N, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.load_state_dict({"weight": other})
    weight.hold_(layer.weight.held)


EXCHANGES: dict[str, Callable[[QuantizedTensor, QuantizedTensor], Any]] = {
    "its tensors": lambda w, other: (setattr(w, "scale", other.scale), setattr(w, "qdata", other.qdata)),
    "data": lambda w, other: setattr(w, "data", other),
    "copy_": lambda w, other: w.copy_(other),
    "hold_": lambda w, other: w.hold_(other.held),
    "a scale in place": lambda w, other: (w.qdata.copy_(other.qdata), w.scale.copy_(other.scale)),
    "load_state_dict": _load_state_dict,
}


@pytest.mark.parametrize("case", EXCHANGES)
def test_a_product_uses_the_tensors_that_the_weight_holds(case: str) -> None:
    weight, other = quantized(), quantized(seed=5)
    for _ in range(2):
        assert_same(F.linear(inputs(), weight), F.linear(inputs(), weight.dequantize()))
    expected = F.linear(inputs(), other.dequantize())
    EXCHANGES[case](weight, other)
    for _ in range(2):
        assert_same(F.linear(inputs(), weight), expected)


def test_a_scale_that_is_assigned_after_a_product_counts() -> None:
    weight = quantized()
    before = F.linear(inputs(), weight)
    weight.scale = 2 * weight.scale
    assert_same(F.linear(inputs(), weight), 2 * before)


def test_weights_that_share_their_tensors_each_prepare_their_own_product() -> None:
    weight = quantized()
    F.linear(inputs(), weight)
    same = weight.detach()
    weight.scale = 2 * weight.scale
    assert_same(F.linear(inputs(), weight), 2 * F.linear(inputs(), same))


def test_tensors_that_are_exchanged_while_a_product_is_prepared_leave_nothing_stale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, prepare = quantized(), kernels.prepare_few_rows
    before = F.linear(inputs(), weight.dequantize())
    exchanged = Held({**weight.tensors, "scale": 2 * weight.scale})

    def exchanged_meanwhile(*args: Any) -> Any:
        prepared = prepare(*args)
        another = threading.Thread(target=weight.hold_, args=[exchanged])
        another.start()
        another.join()
        return prepared

    monkeypatch.setattr(kernels, "prepare_few_rows", exchanged_meanwhile)
    F.linear(inputs(), weight)  # of the tensors that it held when the product began, or of those that it holds then
    monkeypatch.setattr(kernels, "prepare_few_rows", prepare)
    assert_same(F.linear(inputs(), weight), 2 * before)


# Autocast


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the stored tensors are copied")


CALLS: dict[str, Callable[..., Tensor]] = {
    "positions": lambda x, w, bias: F.linear(x, w, bias),
    "keywords": lambda x, w, bias: F.linear(weight=w, bias=bias, input=x),
    "nn.Linear": lambda x, w, bias: torch.func.functional_call(
        nn.Linear(x.shape[1], 6), {"weight": w, "bias": bias}, x
    ),
}


@pytest.mark.parametrize("has_gradient", [False, True], ids=["no gradient", "gradient"])
@pytest.mark.parametrize("form", ALL_FORMS)
def test_a_product_in_autocast_copies_no_codes_and_has_the_bits_of_one_that_does(
    form: str, has_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias, copy_handler = quantized_weight(form), inputs(6), HANDLERS[torch.ops.aten._to_copy.default]
    for dtype in (torch.bfloat16, torch.float16):
        rows = [inputs(M, 128) for M in (1, 3, 70)]
        expected = [F.linear(x.to(dtype), weight.to(dtype), bias.to(dtype)) for x in rows]
        monkeypatch.setitem(HANDLERS, torch.ops.aten._to_copy.default, refuse)
        with torch.autocast("cpu", dtype), torch.set_grad_enabled(has_gradient):
            for call in CALLS.values():
                for x, one in zip(rows, expected, strict=True):
                    assert torch.equal(call(x.requires_grad_(has_gradient), weight, bias), one)
        monkeypatch.setitem(HANDLERS, torch.ops.aten._to_copy.default, copy_handler)


OTHER_CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "torch.addmm": torch.addmm,
    "Conv1D": lambda bias, x, w: torch.addmm(bias, x.view(-1, x.size(-1)), w),
    "keywords": lambda bias, x, w: torch.addmm(input=bias, mat1=x, mat2=w, beta=0.5),
    "Tensor.addmm": lambda bias, x, w: bias.addmm(x, w),
    "torch.mm": lambda bias, x, w: torch.mm(x, w),
    "Tensor.mm": lambda bias, x, w: x.mm(w),
    "torch.matmul": lambda bias, x, w: torch.matmul(x, w),
    "Tensor.matmul": lambda bias, x, w: x.matmul(w),
    "@": lambda bias, x, w: x @ w,
    "the weight first": lambda bias, x, w: w.t() @ x.t(),
}


@pytest.mark.parametrize("case", OTHER_CALLS)
def test_other_products_in_autocast_copy_no_codes_either(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, bias, dtype = inputs(), inputs(N), torch.bfloat16
    stored_transposed = QuantizedTensor.quantize(random_weight(K, N), Int8(), transposed=True)
    weights = [stored_transposed, quantized().t()]
    expected = [OTHER_CALLS[case](bias.to(dtype), x.to(dtype), weight.to(dtype)) for weight in weights]
    monkeypatch.setitem(HANDLERS, torch.ops.aten._to_copy.default, refuse)
    for has_gradient in (False, True):
        with torch.autocast("cpu", dtype), torch.set_grad_enabled(has_gradient):
            for weight, one in zip(weights, expected, strict=True):
                assert torch.equal(OTHER_CALLS[case](bias, x.requires_grad_(has_gradient), weight), one)


def test_a_product_into_a_given_tensor_is_not_cast_in_autocast() -> None:
    weight, out = quantized().t(), torch.empty(3, N)
    expected = torch.mm(inputs(), weight)
    with torch.autocast("cpu", torch.bfloat16):
        torch.mm(inputs(), weight, out=out)
    assert_same(out, expected)


@pytest.mark.parametrize("shown", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_gradients_in_autocast_have_the_bits_of_those_by_a_cast_weight(form: str, shown: torch.dtype) -> None:
    weight, gradient = quantized(FORMS[form], shown), inputs(3, N).bfloat16()

    def gradients(multiply: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        x, bias = inputs(3, K).requires_grad_(), inputs(N).requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(multiply(x, bias), (x, bias), gradient)

    def in_autocast(x: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, weight, bias)

    def by_hand(x: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), weight.to(torch.bfloat16), bias.bfloat16())

    for actual, expected in zip(gradients(in_autocast), gradients(by_hand), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("case", EXCHANGES)
def test_a_product_in_autocast_uses_the_tensors_that_the_weight_holds(case: str) -> None:
    weight, other = quantized(), quantized(seed=5)
    before, after = autocast(weight), autocast(other)
    EXCHANGES[case](weight, other)
    for _ in range(2):
        assert torch.equal(autocast(weight), after)
    assert not torch.equal(before, after)


def test_autograd_refuses_a_gradient_in_autocast_by_a_weight_that_was_written_meanwhile() -> None:
    weight, x = quantized(), inputs().requires_grad_()
    with torch.enable_grad():
        autocast(weight)  # what is kept counts writes too
        with torch.autocast("cpu", torch.bfloat16):
            out = F.linear(x, weight).sum()
    weight.copy_(quantized(seed=5))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_where_autocast_is_off_again_a_product_has_the_dtype_of_its_weight() -> None:
    weight = quantized()
    expected = F.linear(inputs(), weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert F.linear(inputs(), weight).dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(F.linear(inputs(), weight), expected)
        with torch.autocast("cpu", torch.float16):
            assert F.linear(inputs(), weight).dtype == torch.float16
        assert F.linear(inputs(), weight).dtype == torch.bfloat16
    assert torch.equal(F.linear(inputs(), weight), expected)


def test_autocast_of_another_device_leaves_a_product_alone() -> None:
    weight = quantized()
    expected = F.linear(inputs(), weight)
    torch.set_autocast_enabled("xpu", True)
    try:
        assert torch.equal(F.linear(inputs(), weight), expected)
    finally:
        torch.set_autocast_enabled("xpu", False)


@pytest.mark.parametrize("shown", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.float64, torch.float16, torch.int32], ids=str)
def test_autocast_leaves_float64_and_integers_as_they_are(shown: torch.dtype, given: torch.dtype) -> None:
    weight = quantized().to(shown)
    for has_gradient in (False, True):
        for bias in (None, inputs(N), inputs(N).double()):

            def multiply(w: Tensor, bias: Tensor | None = bias, has_gradient: bool = has_gradient) -> Tensor:
                with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(has_gradient):
                    return F.linear(inputs().to(given), w, bias).detach()

            expected, refused = result_or_error(multiply, weight.dequantize())
            result, error = result_or_error(multiply, weight)
            assert isinstance(error, type(refused))
            if expected is not None and result is not None:
                assert_same(result, expected)


def test_a_weight_on_the_meta_device_gives_a_shape_in_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert F.linear(inputs().to("meta"), quantized().to("meta")).shape == (3, N)


def test_threads_whose_autocasts_have_other_dtypes_each_get_their_own() -> None:
    weight, wrong, begin = quantized(), list[torch.dtype](), threading.Barrier(2)
    expected = {dtype: F.linear(inputs(dtype=dtype), weight.to(dtype)) for dtype in (torch.bfloat16, torch.float16)}

    def multiply(dtype: torch.dtype) -> None:
        begin.wait()
        with torch.no_grad(), torch.autocast("cpu", dtype):
            for _ in range(200):
                if not torch.equal(F.linear(inputs(), weight), expected[dtype]):
                    wrong.append(dtype)

    threads = [threading.Thread(target=multiply, args=[dtype]) for dtype in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("is_made_in", ["inference mode", "usual mode"])
def test_a_gradient_in_autocast_may_follow_products_in_inference_mode(is_made_in: str) -> None:
    with torch.inference_mode(is_made_in == "inference mode"):
        weight = quantized()
    with torch.inference_mode():
        expected = autocast(weight)
    x = inputs().requires_grad_()
    with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
        out = F.linear(x, weight)
        (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(out, expected)
    assert gradient.shape == x.shape


def test_what_autocast_leaves_at_a_weight_is_in_no_copy_of_it() -> None:
    weight = quantized()
    before = pickle.dumps(weight)
    autocast(weight)
    assert pickle.dumps(weight) == before
    assert copy.deepcopy(weight).held.cast is None
    assert weight.to(torch.bfloat16).qdata is not weight.qdata


def test_a_weight_is_freed_with_what_autocast_leaves_at_it() -> None:
    weight = quantized()
    codes = weakref.ref(weight.qdata)
    autocast(weight)
    del weight
    assert codes() is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("case", [case for case in WATCHERS if case != "autograd"])
def test_who_watches_in_autocast_sees_what_a_float_weight_would_show(case: str) -> None:
    def multiply(weight: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return WATCHERS[case](weight)

    assert_like_dense(multiply, quantized())


# Gradients


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True], ids=["as stored", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_gradient_of_x_makes_no_whole_float_weight(
    form: str, dtype: torch.dtype, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = random_weight(N, K, dtype=dtype)
    weight = QuantizedTensor.quantize(values.t() if transposed else values, FORMS[form], transposed)
    dense, gradient = weight.dequantize().double(), inputs(2, 3, N, dtype=dtype)
    expected = gradient.double() @ (dense.t() if transposed else dense)
    monkeypatch.setattr(products, "compute_dequantized", None)
    x = inputs(2, 3, K, dtype=dtype).requires_grad_()
    with torch.enable_grad():
        out = x @ weight if transposed else F.linear(x, weight)
        (actual,) = torch.autograd.grad(out, x, gradient)
    assert_same(actual, expected.to(dtype))


@pytest.mark.parametrize("form", [*FORMS.values(), get_format({"format": "coded"})], ids=str)
def test_a_gradient_of_bfloat16_is_right_where_a_cpu_has_amx(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cpu(AMX, monkeypatch)
    weight, x = quantized(form, torch.bfloat16), inputs(dtype=torch.bfloat16).requires_grad_()
    with torch.enable_grad():
        (found,) = torch.autograd.grad(F.linear(x, weight).sum(), x)
    assert torch.allclose(found, weight.dequantize().sum(0).expand_as(found), rtol=1e-2, atol=1e-2)


def test_a_gradient_on_the_meta_device_has_its_shape() -> None:
    weight, x = quantized().to("meta"), inputs().to("meta").requires_grad_()
    with torch.enable_grad():
        (found,) = torch.autograd.grad(F.linear(x, weight).sum(), x)
    assert (found.shape, found.is_meta) == (x.shape, True)


def test_a_sparse_matrix_is_multiplied_with_a_weight_as_with_a_float_one() -> None:
    weight, x = quantized(), inputs(3, N)
    assert_same(torch.mm(x.to_sparse(), weight), x @ weight.dequantize())
    with torch.enable_grad():
        assert_same(F.linear(inputs().to_sparse(), weight), F.linear(inputs(), weight.dequantize()))


def test_no_experts_give_no_products() -> None:
    weight = QuantizedTensor.quantize(torch.empty(0, N, K), Int8())
    assert torch.bmm(torch.empty(0, 2, K), weight.mT).shape == (0, 2, N)
    assert torch.bmm(torch.empty(0, 2, N), weight).shape == (0, 2, K)
    assert torch.bmm(weight, torch.empty(0, K, 2)).shape == (0, N, 2)


@pytest.mark.parametrize("way", ["bmm", "grouped_mm"])
def test_a_gradient_through_experts_takes_one_after_the_other(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "grouped_mm" and not torch._C._dispatch_has_computed_kernel_for_dispatch_key("aten::_grouped_mm", "CPU"):
        pytest.skip("this release of PyTorch has no _grouped_mm on a CPU")
    values = random_weight(3 * N, K, dtype=torch.bfloat16).view(3, N, K)
    weight = QuantizedTensor.quantize(values, Int8())
    gradient, x = inputs(3, 4, N, dtype=torch.bfloat16), inputs(3, 4, K, dtype=torch.bfloat16).requires_grad_()
    expected = (gradient.double() @ weight.dequantize().double()).bfloat16()
    monkeypatch.setattr(products, "compute_dequantized", None)
    with torch.enable_grad():
        if way == "bmm":
            out = torch.bmm(x, weight.mT)
        else:
            ends = torch.tensor([4, 8, 12], dtype=torch.int32)
            out = torch._grouped_mm(x.view(12, K), weight.mT, offs=ends).view(3, 4, N)
        (actual,) = torch.autograd.grad(out, x, gradient)
    assert_same(actual, expected)


# Memory that was freed


def test_a_gradient_by_a_weight_that_was_freed_is_an_error_and_no_crash() -> None:
    weight, x = quantized(), inputs().requires_grad_()
    with torch.enable_grad():
        out = F.linear(x, weight).sum()
    weight.tensors["qdata"].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"freed|not allocated|setStorage"):
        out.backward()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8", "int4", "uint4", "column_scale"])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_what_was_freed_is_an_error_and_no_crash(rows: int, form: str) -> None:
    # An input that PyTorch multiplies with the factors of columns is not ours to check.
    for freed in ("x", "qdata", "scale", "bias")[form == "column_scale" :]:
        weight, x, bias = quantized(FORMS[form]), inputs(rows, K), inputs(N)
        F.linear(x, weight, bias)
        tensors = {"x": x, "bias": bias, **weight.tensors}
        tensors[freed].untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match=r"freed|not allocated|setStorage"):
            F.linear(x, weight, bias)


def test_a_format_without_a_kernel_is_traced_as_the_product_with_its_dequantized_weight() -> None:
    weight = quantized(Codebook4())

    def multiply(x: Tensor) -> Tensor:
        return products.multiply(x, weight.tensors, weight.format, weight.stored_shape)

    traced = make_fx(multiply, tracing_mode="fake", _allow_non_fake_inputs=True)(inputs())
    assert_same(traced(inputs()), F.linear(inputs(), weight.dequantize()))
