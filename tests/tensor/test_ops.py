"""What each op makes of a quantized weight: always the dense result, and a quantized weight where that is possible."""

from __future__ import annotations

import copy
import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import by_default, covering, exhaustive
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, get_swa_multi_avg_fn
from weights import FORMS, KINDS, LAYOUTS, quantized_weight, random_weight, same_stored, weight_of

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, dequantize_, quantize_
from hf_trainweights.errors import UnsupportedError
from hf_trainweights.tensor.dispatch import FALLBACKS, HANDLERS
from hf_trainweights.tensor.read_only import ReadOnlyTensor
from hf_trainweights.testing.values import assert_close_product

every_form = pytest.mark.parametrize("form", FORMS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)

Op = Callable[[Tensor], Any]


@pytest.fixture(autouse=True)
def fresh_fallbacks() -> Iterator[None]:
    FALLBACKS.clear()
    yield
    FALLBACKS.clear()


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def tensors(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, tuple | list) else [value]


def assert_equals_dense(op: Op, weight: QuantizedTensor) -> list[Tensor]:
    """Check that `op` gives for the weight what it gives for the float weight; return what it gave."""
    results, expected = tensors(op(weight)), tensors(op(weight.dequantize()))
    assert len(results) == len(expected)
    for result, dense in zip(results, expected, strict=True):
        assert (result.shape, result.dtype, result.device) == (dense.shape, dense.dtype, dense.device)
        assert torch.equal(result.dequantize() if isinstance(result, QuantizedTensor) else result, dense)
    return results


def assert_close_to_dense(op: Op, weight: QuantizedTensor) -> None:
    """Check that a product with the weight is one with the float weight, within the bound of `assert_close_product`."""
    (result,), (dense,), (exact,) = (
        tensors(op(each)) for each in (weight, weight.dequantize(), weight.dequantize(torch.float64))
    )
    assert type(result) is Tensor
    assert result.device == dense.device
    assert_close_product(result, dense, exact)


# Views. Each of these works on every layout; the sets after it are the layouts in which the result stays quantized.

MATRIX, MATRIX_T, EXPERTS, EXPERTS_T = LAYOUTS
ALL = frozenset(LAYOUTS)
STACKED = frozenset({EXPERTS, EXPERTS_T})
FRONT_IS_NOT_K = frozenset({MATRIX, EXPERTS, EXPERTS_T})

VIEWS: dict[str, tuple[Op, frozenset[str]]] = {
    "w[1]": (operator.itemgetter(1), STACKED),
    "w[-1]": (operator.itemgetter(-1), STACKED),
    "w[:]": (operator.itemgetter(slice(None)), ALL),
    "w[..., :]": (operator.itemgetter((..., slice(None))), ALL),
    "w[...]": (operator.itemgetter(...), ALL),
    "w[-99:99]": (operator.itemgetter(slice(-99, 99)), FRONT_IS_NOT_K),
    "w[1:3]": (operator.itemgetter(slice(1, 3)), FRONT_IS_NOT_K),
    "w[::2]": (operator.itemgetter(slice(None, None, 2)), FRONT_IS_NOT_K),
    "w[-2:]": (operator.itemgetter(slice(-2, None)), FRONT_IS_NOT_K),
    "w[2:1]": (operator.itemgetter(slice(2, 1)), FRONT_IS_NOT_K),
    "w[1:999]": (operator.itemgetter(slice(1, 999)), FRONT_IS_NOT_K),
    "w[..., 1:4]": (operator.itemgetter((..., slice(1, 4))), frozenset({MATRIX_T, EXPERTS_T})),
    "w[..., 1:4, :]": (operator.itemgetter((..., slice(1, 4), slice(None))), frozenset({MATRIX, EXPERTS})),
    "w[..., 0]": (operator.itemgetter((..., 0)), frozenset()),
    "w[None]": (operator.itemgetter(None), frozenset()),
    "w[list]": (operator.itemgetter([2, 0, 2, -1]), FRONT_IS_NOT_K),
    "w[tensor]": (lambda w: w[torch.tensor([1, 0])], FRONT_IS_NOT_K),
    "w[empty]": (lambda w: w[torch.tensor([], dtype=torch.long)], FRONT_IS_NOT_K),
    "w[0-d tensor]": (lambda w: w[torch.tensor(1)], STACKED),
    "w[mask]": (lambda w: w[torch.arange(len(w)) % 2 == 0], FRONT_IS_NOT_K),
    "w[mask of weights]": (lambda w: w[w > 0], frozenset()),
    "w[tensor, tensor]": (lambda w: w[torch.tensor([0, 1]), torch.tensor([2, 3])], frozenset()),
    "w[:, tensor]": (lambda w: w[:, torch.tensor([0, 2])], frozenset()),
    "w[2-d tensor]": (lambda w: w[torch.tensor([[0, 1], [2, 0]])], frozenset({MATRIX})),
    "select last": (lambda w: w.select(-1, 1), frozenset()),
    "narrow": (lambda w: w.narrow(0, 1, 2), FRONT_IS_NOT_K),
    "split": (lambda w: w.split(2), FRONT_IS_NOT_K),
    "split sizes": (lambda w: w.split([1, len(w) - 1]), FRONT_IS_NOT_K),
    "split last": (lambda w: w.split(4, dim=-1), frozenset({MATRIX_T, EXPERTS_T})),
    "chunk": (lambda w: w.chunk(2), FRONT_IS_NOT_K),
    "tensor_split": (lambda w: w.tensor_split(2, dim=-2), frozenset({MATRIX, EXPERTS})),
    "unbind": (lambda w: w.unbind(), STACKED),
    "unbind last": (lambda w: w.unbind(-1), frozenset()),
    "iter": (list, STACKED),
    "mT": (lambda w: w.mT, ALL),
    "mT.mT": (lambda w: w.mT.mT, ALL),
    "transpose": (lambda w: w.transpose(-2, -1), ALL),
    "transpose front": (lambda w: w.transpose(0, 1), frozenset({MATRIX, MATRIX_T})),
    "transpose nothing": (lambda w: w.transpose(1, 1), frozenset()),
    "permute": (lambda w: w.permute(*range(w.dim() - 2), -1, -2), ALL),
    "permute all": (lambda w: w.permute(*reversed(range(w.dim()))), frozenset({MATRIX, MATRIX_T})),
    "swapaxes": (lambda w: w.swapaxes(-1, -2), ALL),
    "view same": (lambda w: w.view(w.shape), ALL),
    "reshape same": (lambda w: w.reshape(w.shape), ALL),
    "flatten": (lambda w: w.flatten(), frozenset()),
    "reshape": (lambda w: w.reshape(-1, 2), frozenset()),
    "expand same": (lambda w: w.expand(-1, *w.shape[1:]), ALL),
    "expand": (lambda w: w.expand(2, *w.shape), frozenset()),
    "unsqueeze": (lambda w: w.unsqueeze(0), frozenset()),
    "index_select": (lambda w: w.index_select(0, torch.tensor([0, 1])), frozenset()),
}


# One row is dequantized alone, the weight is not.
ROWS = {
    *((name, MATRIX) for name in ("w[1]", "w[-1]", "w[0-d tensor]")),
    *((name, MATRIX_T) for name in ("w[..., 0]", "select last")),
}


quantized_once = functools.cache(quantized_weight)


@pytest.mark.slow
@pytest.mark.parametrize("strength", [2, *exhaustive(3)])
@pytest.mark.parametrize("view", VIEWS)
def test_views_equal_the_dense_ones_and_stay_quantized(view: str, strength: int) -> None:
    op, stays = VIEWS[view]
    cases = list(itertools.product(LAYOUTS, KINDS, (False, True)))
    for layout, form, inference in (cases[number] for number in covering(cases, strength)):
        FALLBACKS.clear()
        weight = quantized_once(form, layout)
        with torch.inference_mode(inference):
            results = assert_equals_dense(op, weight)
        if layout in stays:
            assert {type(result) for result in results} == {QuantizedTensor}
        else:
            dense = weight.dequantize().contiguous()
            assert [type(result) is ReadOnlyTensor for result in results] == [
                part.untyped_storage()._cdata == dense.untyped_storage()._cdata for part in tensors(op(dense))
            ]
        assert bool(FALLBACKS) == (layout not in stays and (view, layout) not in ROWS)
        for result in results:
            if isinstance(result, QuantizedTensor):
                assert result.format == weight.format
                assert result.scale.dtype == weight.scale.dtype


def test_inference_mode_may_begin_and_end_anywhere() -> None:
    outside, vector = quantized_weight("int4", "experts"), x(2, 128)
    with torch.inference_mode():
        inside = quantized_weight("int4", "experts")
        results = [F.linear(vector, weight[1].mT.mT[1:]) for weight in (outside, inside, outside.detach())]
    results += [F.linear(vector, weight[1].mT.mT[1:]) for weight in (outside, inside)]
    assert all(torch.equal(result, results[0]) for result in results)
    assert not outside[1].is_inference()


COPIES = {"w[::2]", "w[list]", "w[empty]", "w[mask]", "w[tensor]", "w[0-d tensor]", "w[2-d tensor]"}


@pytest.mark.slow
@pytest.mark.parametrize("view", [name for name, (_, stays) in VIEWS.items() if stays and name not in COPIES])
def test_quantized_views_have_the_strides_of_dense_ones(view: str) -> None:
    op, stays = VIEWS[view]
    for layout in stays:
        weight = quantized_weight(layout=layout)
        for result, dense in zip(tensors(op(weight)), tensors(op(weight.dequantize())), strict=True):
            assert (result.stride(-1) < result.stride(-2)) == (dense.stride(-1) < dense.stride(-2))
            assert result.mT.stride() == (*result.stride()[:-2], result.stride(-1), result.stride(-2))


def test_views_share_the_memory_of_the_weight() -> None:
    weight = quantized_weight("int4", "experts")
    addresses = {tensor.untyped_storage().data_ptr() for tensor in weight.tensors.values()}
    for view in (
        weight[1],
        weight[1:],
        weight.mT,
        weight.detach(),
        weight.split(1)[2],
        weight.unbind()[0],
        weight.data,
    ):
        assert {tensor.untyped_storage().data_ptr() for tensor in view.tensors.values()} == addresses


def indices(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    """Return a strategy for what may stand between the brackets of a tensor of this shape."""
    entries = [
        st.integers(-size, size - 1)
        | st.slices(size).filter(lambda each: each.step is None or each.step > 0)
        | st.lists(st.integers(-size, size - 1), max_size=4)
        for size in shape
    ]
    whole = st.integers(0, len(shape)).flatmap(lambda count: st.tuples(*entries[:count]))
    return whole | whole.map(lambda index: (..., *index[:1])) | whole.map(lambda index: (None, *index))


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(data=st.data(), form=st.sampled_from(list(FORMS)), layout=st.sampled_from(list(LAYOUTS)))
def test_any_index_equals_the_dense_one(data: st.DataObject, form: str, layout: str) -> None:
    weight = quantized_once(form, layout)
    index = data.draw(indices(tuple(weight.shape)))
    dense = weight.dequantize()
    try:
        expected = dense[index]
    except IndexError:  # Lists that do not broadcast against each other.
        with pytest.raises(IndexError, match=r"(?s)shape mismatch|broadcast|index"):
            weight[index]
        return
    result = weight[index]
    assert result.shape == expected.shape
    assert torch.equal(result, expected)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(data=st.data(), layout=st.sampled_from(list(LAYOUTS)))
def test_any_chain_of_views_equals_the_dense_one(data: st.DataObject, layout: str) -> None:
    weight: Tensor = quantized_weight("int4_g32", layout)
    dense = weight.dequantize()
    for _ in range(data.draw(st.integers(1, 4))):
        first, second = (data.draw(st.integers(-dense.dim(), dense.dim() - 1)) for _ in range(2))
        start = data.draw(st.integers(0, dense.shape[first]))
        length = data.draw(st.integers(0, dense.shape[first] - start))
        weight = weight.narrow(first, start, length).transpose(first, second)
        dense = dense.narrow(first, start, length).transpose(first, second)
    assert weight.shape == dense.shape
    assert torch.equal(weight, dense)


OUT_OF_RANGE: dict[str, Op] = {
    "select dimension": lambda w: w.select(-4, 0),
    "select index": lambda w: w.select(0, 3),
    "slice dimension": lambda w: torch.ops.aten.slice.Tensor(w, 3, 0, 1),
    "transpose": lambda w: w.transpose(0, 5),
    "permute": lambda w: w.permute(0, 1, 3),
    "split dimension": lambda w: w.split(1, dim=3),
    "unbind": lambda w: w.unbind(-4),
    "index": lambda w: w[torch.tensor([3])],
    "embedding": lambda w: F.embedding(torch.tensor([3]), w[:, 0]),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_what_is_out_of_range_raises_as_for_a_float_weight(name: str) -> None:
    weight = quantized_weight(layout="experts")
    for tensor in (weight, weight.dequantize()):
        with pytest.raises(IndexError, match=r"out of range|out of bounds"):
            OUT_OF_RANGE[name](tensor)


@pytest.mark.parametrize(("sizes", "message"), [([2, 2], "sum exactly"), ([4, 4], "sum exactly"), (0, "can only be 0")])
def test_split_refuses_what_it_refuses_for_a_float_weight(sizes: Any, message: str) -> None:
    weight = quantized_weight()
    for tensor in (weight, weight.dequantize()):
        with pytest.raises(RuntimeError, match=message):
            tensor.split(sizes)


def test_split_of_no_rows_gives_one_piece() -> None:
    weight = quantized_weight()[:0]
    (piece,) = weight.split(2)
    assert type(piece) is QuantizedTensor
    assert piece.shape == (0, 128)


# Copies and conversions


@pytest.mark.slow
@every_form
def test_another_float_dtype_changes_what_is_shown_and_nothing_that_is_stored(form: str) -> None:
    for layout in LAYOUTS:
        weight = quantized_weight(form, layout)
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            moved = weight.to(dtype)
            assert type(moved) is QuantizedTensor
            assert moved.dtype == moved.dequantize().dtype == dtype
            assert torch.equal(moved.dequantize(), weight.dequantize(dtype))
            assert same_stored(moved.to(torch.float32), weight)
            assert moved.qdata.data_ptr() != weight.qdata.data_ptr()
        assert not FALLBACKS


def test_the_named_conversions_do_the_same() -> None:
    weight = quantized_weight(dtype=torch.bfloat16)
    conversions = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}
    for name, dtype in conversions.items():
        assert same_stored(getattr(weight, name)(), weight.to(dtype))
    assert weight.to(torch.bfloat16) is weight
    assert weight.cpu() is weight
    assert type(weight.type(torch.float32)) is QuantizedTensor


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e5m2], ids=str)
def test_any_other_dtype_dequantizes(dtype: torch.dtype) -> None:
    weight = quantized_weight()
    assert type(weight.to(dtype)) is Tensor
    assert weight.to(dtype).dtype == dtype
    assert FALLBACKS["aten._to_copy.default"] == 2
    if dtype == torch.int32:
        assert torch.equal(weight.to(dtype), weight.dequantize().to(dtype))


@every_layout
def test_to_meta_moves_every_stored_tensor(layout: str) -> None:
    weight = quantized_weight("int4", layout)
    moved = weight.to("meta")
    assert type(moved) is QuantizedTensor
    assert moved.is_meta
    assert all(tensor.is_meta for tensor in moved.tensors.values())
    assert (moved.shape, moved.stride(), moved.dtype) == (weight.shape, weight.stride(), weight.dtype)
    assert weight.to("meta", torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.slow
@every_form
def test_clone_and_detach_keep_everything(form: str) -> None:
    for layout in LAYOUTS:
        weight = quantized_weight(form, layout, torch.bfloat16)
        for copied in (weight.clone(), weight.detach(), weight.data):
            assert same_stored(copied, weight)
        assert weight.detach().qdata.data_ptr() == weight.qdata.data_ptr()
        assert weight.clone().qdata.data_ptr() != weight.qdata.data_ptr()
        assert not FALLBACKS


def test_a_contiguous_copy_of_a_transposed_weight_is_dense() -> None:
    weight = quantized_weight(layout="matrix_transposed")
    assert type(weight.contiguous()) is ReadOnlyTensor
    assert weight.contiguous().is_contiguous()
    assert torch.equal(weight.contiguous(), weight.dequantize())
    assert type(weight.mT.contiguous()) is QuantizedTensor


@pytest.mark.slow
@every_form
def test_copy_between_equal_layouts_is_exact(form: str) -> None:
    for layout in LAYOUTS:
        target, source = quantized_weight(form, layout), quantized_weight(form, layout, seed=1)
        address = target.qdata.data_ptr()
        assert target.copy_(source) is target
        assert same_stored(target, source)
        assert target.qdata.data_ptr() == address != source.qdata.data_ptr()


@pytest.mark.parametrize(
    "source",
    [
        random_weight(6, 128),
        quantized_weight("int4"),
        quantized_weight("int8_g32"),
        quantized_weight(dtype=torch.bfloat16),
        quantized_weight()[:3],
        QuantizedTensor.quantize(random_weight(6, 128), FORMS["int8"], transposed=True),
    ],
    ids=["float", "format", "group size", "scale dtype", "shape", "transposed"],
)
def test_copy_from_anything_else_is_refused_and_changes_nothing(source: Tensor) -> None:
    target = quantized_weight()
    before = target.clone()
    with pytest.raises(UnsupportedError, match=r"copy_: expected two quantized tensors of one format.*assign=True"):
        target.copy_(source)
    assert same_stored(target, before)


@pytest.mark.slow
@every_form
def test_a_copy_of_its_own_float_values_changes_nothing(form: str) -> None:
    for layout in LAYOUTS:
        target = quantized_weight(form, layout)
        before = target.clone()
        assert target.copy_(target.dequantize()) is target
        assert same_stored(target, before)
        other = target.dequantize()
        other[0, 0] += 1
        with pytest.raises(UnsupportedError, match=r"copy_: .*DistributedDataParallel give all processes the same"):
            target.copy_(other)
        assert same_stored(target, before)


def test_copy_into_a_float_tensor_is_refused() -> None:
    dense = torch.zeros(6, 128)
    with pytest.raises(
        UnsupportedError, match=r"int8.* to be copied into torch\.float32 of shape \(6, 128\).*assign=True"
    ):
        dense.copy_(quantized_weight())
    assert not dense.any()


def test_empty_like_stays_quantized_and_to_empty_inflates_nothing() -> None:
    weight = quantized_weight("int4", "experts_transposed")
    for empty in (torch.empty_like(weight), torch.empty_like(weight, device="meta")):
        assert type(empty) is QuantizedTensor
        assert (empty.shape, empty.stride(), empty.format) == (weight.shape, weight.stride(), weight.format)
    assert torch.empty_like(weight, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert type(torch.empty_like(weight, dtype=torch.int32)) is Tensor
    layer = nn.Linear(128, 6)
    layer.weight = nn.Parameter(quantized_weight())
    expected = layer.weight.clone()
    state_dict = copy.deepcopy(layer.state_dict())
    layer.to("meta").to_empty(device="cpu")
    assert type(layer.weight) is QuantizedTensor
    layer.load_state_dict(state_dict)
    assert same_stored(layer.weight.detach(), expected)


FACTORIES: dict[str, Op] = {
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda w: torch.full_like(w, 2.0),
    "zeros_like integers": lambda w: torch.zeros_like(w, dtype=torch.int64),
    "new_zeros": lambda w: w.new_zeros(2, 3),
    "new_ones": lambda w: w.new_ones(2, 3),
    "new_full": lambda w: w.new_full((2,), 7.0),
    "new_tensor": lambda w: w.new_tensor([1.0, 2.0]),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factories_give_plain_tensors_and_read_no_value(name: str) -> None:
    for layout in LAYOUTS:
        (result,) = assert_equals_dense(FACTORIES[name], quantized_weight(layout=layout, dtype=torch.bfloat16))
        assert type(result) is Tensor
        assert not FALLBACKS


@pytest.mark.parametrize("factory", [torch.rand_like, torch.randn_like, lambda w: w.new_empty(4)])
def test_random_factories_give_plain_tensors(factory: Op) -> None:
    result = factory(quantized_weight(dtype=torch.bfloat16))
    assert type(result) is Tensor
    assert result.dtype == torch.bfloat16
    assert not FALLBACKS


# Products. Each names the layouts it applies to; x is `[5, 128]`, an expert's input `[3, 5, 128]`.


def x(*shape: int, seed: int = 1) -> Tensor:
    return random_weight(*shape, seed=seed)


OFFSETS = torch.tensor([2, 4, 5], dtype=torch.int32)
PRODUCTS: dict[str, tuple[Op, str]] = {
    "linear": (lambda w: F.linear(x(5, 128).to(w.dtype), w), MATRIX),
    "linear with bias": (lambda w: F.linear(x(5, 128).to(w.dtype), w, x(6).to(w.dtype)), MATRIX),
    "linear by keywords": (lambda w: F.linear(input=x(5, 128).to(w.dtype), weight=w, bias=x(6).to(w.dtype)), MATRIX),
    "embedding by keywords": (lambda w: F.embedding(input=torch.tensor([1, 0]), weight=w), MATRIX),
    "mm by keywords": (lambda w: torch.mm(input=x(5, 128).to(w.dtype), mat2=w.t()), MATRIX),
    "linear of a batch": (lambda w: F.linear(x(2, 5, 128).to(w.dtype), w, x(6).to(w.dtype)), MATRIX),
    "linear of a part": (lambda w: F.linear(x(5, 128).to(w.dtype), w[1:4]), MATRIX),
    "linear transposed": (lambda w: F.linear(x(5, 128).to(w.dtype), w.t()), MATRIX_T),
    "addmm": (lambda w: torch.addmm(x(6).to(w.dtype), x(5, 128).to(w.dtype), w), MATRIX_T),
    "mm": (lambda w: torch.mm(x(5, 128).to(w.dtype), w.t()), MATRIX),
    "mm from the left": (lambda w: torch.mm(w, x(128, 4).to(w.dtype)), MATRIX),
    "mm transposed": (lambda w: torch.mm(x(5, 128).to(w.dtype), w), MATRIX_T),
    "matmul": (lambda w: x(2, 5, 128).to(w.dtype) @ w.t(), MATRIX),
    "matmul of experts": (lambda w: x(3, 5, 128).to(w.dtype) @ w.mT, EXPERTS),
    "matmul of experts transposed": (lambda w: x(3, 5, 128).to(w.dtype) @ w, EXPERTS_T),
    "bmm": (lambda w: torch.bmm(x(3, 5, 128).to(w.dtype), w.mT), EXPERTS),
    "bmm transposed": (lambda w: torch.bmm(x(3, 5, 128).to(w.dtype), w), EXPERTS_T),
    "baddbmm": (lambda w: torch.baddbmm(x(3, 1, 6).to(w.dtype), x(3, 5, 128).to(w.dtype), w), EXPERTS_T),
    "linear of one expert": (lambda w: F.linear(x(5, 128).to(w.dtype), w[1]), EXPERTS),
    "bmm of chosen experts": (
        lambda w: torch.bmm(w[torch.tensor([2, 0, 2, 1])], x(4, 128, 1).to(w.dtype)),
        EXPERTS,
    ),
    "embedding": (lambda w: F.embedding(torch.tensor([[0, 5], [5, 2]]), w), MATRIX),
    "embedding of int32": (lambda w: F.embedding(torch.tensor([3, 1], dtype=torch.int32), w), MATRIX),
    "embedding of nothing": (lambda w: F.embedding(torch.zeros(2, 0, dtype=torch.long), w), MATRIX),
    "embedding of one": (lambda w: F.embedding(torch.tensor(3), w, padding_idx=3), MATRIX),
}


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inference", [False, True], ids=["grad", "inference"])
def test_products_equal_those_of_the_dense_weight(name: str, dtype: torch.dtype, inference: bool) -> None:
    op, layout = PRODUCTS[name]
    for form in FORMS:
        with torch.inference_mode(inference):
            check = assert_equals_dense if name.startswith("embedding") else assert_close_to_dense
            check(op, quantized_weight(form, layout, dtype))
        assert not FALLBACKS


@pytest.mark.slow
@pytest.mark.skipif(
    not torch._C._dispatch_has_computed_kernel_for_dispatch_key("aten::_grouped_mm", "CPU"),
    reason="this PyTorch multiplies groups on a GPU only",
)
@every_form
def test_grouped_mm_equals_that_of_the_dense_weight(form: str) -> None:
    for layout in (EXPERTS, EXPERTS_T):
        # On a CPU the op takes bfloat16 with rows of a multiple of 16 bytes.
        shape, transposed = ((3, 128, 16), True) if layout == EXPERTS_T else ((3, 16, 128), False)
        weight = weight_of(FORMS[form], shape, torch.bfloat16, transposed)
        inputs = x(5, 128).bfloat16()

        def op(w: Tensor, transposed: bool = transposed, inputs: Tensor = inputs) -> Tensor:
            matrices = w if transposed else w.mT
            if w.dtype is torch.float64:
                parts = inputs.double().tensor_split(OFFSETS[:-1].long())
                return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])
            return torch._grouped_mm(inputs, matrices, offs=OFFSETS)

        assert_close_to_dense(op, weight)
        assert not FALLBACKS


def test_embedding_refuses_a_negative_index_as_a_float_weight_does() -> None:
    weight = quantized_weight()
    for tensor in (weight, weight.dequantize()):
        with pytest.raises(IndexError, match="out of range"):
            F.embedding(torch.tensor([-1]), tensor)


@pytest.mark.slow
@pytest.mark.parametrize(
    "op",
    [
        lambda w: torch.einsum("bk,nk->bn", x(2, 128), w),
        lambda w: torch.mv(w, x(128)),
        lambda w: F.conv1d(x(1, 6, 128), w.unsqueeze(0)),
        lambda w: torch.func.functional_call(nn.Linear(128, 6, bias=False), {"weight": w}, x(2, 128)),
        lambda w: torch.func.jacrev(lambda row: F.linear(row, w))(x(128)),
    ],
    ids=["einsum", "mv", "conv1d", "functional_call", "jacrev"],
)
def test_other_ways_to_a_product_are_right_too(op: Op) -> None:
    weight = quantized_weight("int4")
    (result,), (dense,) = tensors(op(weight)), tensors(op(weight.dequantize()))
    assert (result.shape, result.dtype) == (dense.shape, dense.dtype)
    # Not equal: a kernel sums in another order.
    assert (result - dense).norm() <= 1e-6 * dense.norm()


# Gradients


def gradient(op: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    inputs = inputs.clone().requires_grad_()
    out = op(inputs, weight)
    out.square().sum().backward()
    return out.detach(), inputs.grad


GRADIENTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], str]] = {
    "linear": (lambda v, w: F.linear(v, w, v.new_ones(6)), (5, 128), MATRIX),
    "linear of a batch": (lambda v, w: F.linear(v, w), (2, 5, 128), MATRIX),
    "transposed": (lambda v, w: v @ w, (5, 128), MATRIX_T),
    "bmm": (lambda v, w: torch.bmm(v, w.mT), (3, 5, 128), EXPERTS),
    "experts one by one": (lambda v, w: F.linear(F.linear(v, w[0]) @ w[1], w[2]), (5, 128), EXPERTS),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradient_of_the_input_equals_that_of_the_dense_weight(name: str) -> None:
    op, shape, layout = GRADIENTS[name]
    for form in FORMS:
        weight = quantized_weight(form, layout)
        results, dense = gradient(op, x(*shape), weight), gradient(op, x(*shape), weight.dequantize())
        exact = gradient(op, x(*shape).double(), weight.dequantize(torch.float64))
        for result, expected, reference in zip(results, dense, exact, strict=True):
            assert_close_product(result, expected, reference)
        assert not FALLBACKS, form


@pytest.mark.parametrize("name", GRADIENTS)
def test_no_dense_weight_lives_between_forward_and_backward(name: str) -> None:
    op, shape, layout = GRADIENTS[name]
    weight = quantized_weight("int4", layout)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    inputs = x(*shape).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = op(inputs, weight)
    stored = {tensor.untyped_storage().data_ptr() for tensor in weight.tensors.values()}
    quantized = [tensor for tensor in saved if isinstance(tensor, QuantizedTensor)]
    assert quantized
    assert all(t.untyped_storage().data_ptr() in stored for each in quantized for t in each.tensors.values())
    matrix = weight.shape[-1] * weight.shape[-2]
    assert all(tensor.numel() < matrix for tensor in saved if not isinstance(tensor, QuantizedTensor))
    out.sum().backward()
    assert inputs.grad is not None


@pytest.mark.slow
def test_second_gradients_are_right() -> None:
    weight = quantized_weight("int4").to(torch.float64)
    inputs = random_weight(2, 128, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: F.linear(v, weight).sin(), inputs)
    assert torch.autograd.gradgradcheck(lambda v: F.linear(v, weight).sin(), inputs[:1].detach().requires_grad_())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_gradients_are_equal(use_reentrant: bool) -> None:
    weight = quantized_weight("int4")

    def plain(v: Tensor, w: Tensor) -> Tensor:
        return F.linear(v, w).sin()

    def checkpointed(v: Tensor, w: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(lambda inner: plain(inner, w), v, use_reentrant=use_reentrant)

    assert torch.equal(gradient(checkpointed, x(5, 128), weight)[1], gradient(plain, x(5, 128), weight)[1])


# Compilers


class TwoLayers(nn.Module):
    """A linear layer and a table, so that a compiled graph holds a product, a look-up and a bias."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 128)
        self.table.weight = nn.Parameter(quantized_weight(form, seed=2))
        self.linear = nn.Linear(128, 6)
        self.linear.weight = nn.Parameter(quantized_weight(form))

    def forward(self, v: Tensor, indices: Tensor) -> Tensor:
        return self.linear(v + self.table(indices)).relu()


def inputs_for(rows: int) -> tuple[Tensor, Tensor]:
    return x(rows, 128), torch.arange(rows) % 6


@pytest.mark.slow
@pytest.mark.parametrize("form", by_default(("int8",), FORMS))
def test_compiles_to_one_graph_with_equal_results_and_gradients(form: str) -> None:
    model = TwoLayers(form)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    v, indices = inputs_for(5)
    with torch.no_grad():
        assert torch.equal(compiled(v, indices), model(v, indices))
    out, grad = gradient(lambda inner, _: compiled(inner, indices), v, v)
    expected, expected_grad = gradient(lambda inner, _: model(inner, indices), v, v)
    assert torch.equal(out, expected)
    assert torch.equal(grad, expected_grad)


@pytest.mark.slow
def test_compiles_with_dynamic_shapes_once() -> None:
    model = TwoLayers("int4")
    graphs = []

    def backend(graph: torch.fx.GraphModule, example_inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for rows in (3, 4, 7):
        assert torch.equal(compiled(*inputs_for(rows)), model(*inputs_for(rows)))
    assert len(graphs) == 1


@pytest.mark.slow
def test_a_graph_depends_on_the_format_of_its_weights() -> None:
    compiled = torch.compile(lambda v, w: F.linear(v, w), fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(recompile_limit=5):  # a graph for each format
        for form in ("int8", "int8_g32", "int4", "int8_column_scale"):
            weight = quantized_weight(form)
            assert torch.equal(compiled(x(5, 128), weight), F.linear(x(5, 128), weight))


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_views_and_products_compile_to_one_graph(mode: Callable[[], Any]) -> None:
    experts, transposed = quantized_weight("int4", "experts"), quantized_weight("int8", "experts_transposed")

    def model(v: Tensor, experts: Tensor, transposed: Tensor, chosen: Tensor) -> Tensor:
        first = F.linear(v, experts[1]) + v @ transposed[2] + F.linear(v, experts[1:][0])
        return first + torch.bmm(v.expand(2, -1, -1), experts[chosen].mT).sum(0) + v @ experts.split(1)[0][0].t()

    arguments = (x(5, 128), experts, transposed, torch.tensor([2, 0]))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with mode():
        expected = model(*arguments)
        # Traced, experts are dequantized together; one at a time they are multiplied in another order.
        assert (compiled(*arguments) - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.exhaustive
def test_inductor_is_as_close_as_to_the_dense_weight() -> None:
    model = TwoLayers("int4").eval()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs_for(5)), model(*inputs_for(5)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("strict", by_default((False,), (False, True)))
def test_exports_are_equal_after_saving_and_loading(strict: bool, tmp_path: Any) -> None:
    model = TwoLayers("int4").eval()
    rows = torch.export.Dim("rows", min=2, max=64)
    shapes = {"v": {0: rows}, "indices": {0: rows}}
    exported = torch.export.export(model, inputs_for(5), strict=strict, dynamic_shapes=shapes)
    torch.export.save(exported, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    for program in (exported, loaded, exported.run_decompositions()):
        for count in (5, 9):
            assert torch.equal(program.module()(*inputs_for(count)), model(*inputs_for(count)))
    assert type(loaded.state_dict["linear.weight"]) is QuantizedTensor
    dense = sum(weight.numel() * 4 for weight in (model.table.weight, model.linear.weight))
    assert len(b"".join(tensor.numpy().tobytes() for tensor in model.linear.weight.tensors.values())) < dense / 8


@pytest.mark.slow
def test_an_export_after_dequantize_names_no_class_of_ours(tmp_path: Any) -> None:
    layer = nn.Linear(128, 6)
    layer.weight = nn.Parameter(quantized_weight("int4").dequantize())
    torch.export.save(torch.export.export(layer, (x(5, 128),)), tmp_path / "layer.pt2")
    assert b"hf_trainweights" not in (tmp_path / "layer.pt2").read_bytes()


def test_a_stream_is_recorded_for_each_stored_tensor() -> None:
    weight, recorded = quantized_weight("int4"), []
    # No stream of a CPU can be recorded.
    HANDLERS[torch.ops.aten.record_stream.default](lambda stored, _: recorded.append(stored), weight, None)
    assert all(map(operator.is_, recorded, weight.tensors.values()))
    assert len(recorded) == len(weight.tensors)


AVERAGES: dict[str, dict[str, Any]] = {
    "equal steps": {},
    "equal steps at once": {"multi_avg_fn": get_swa_multi_avg_fn()},
    "exponential at once": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "one by one": {"avg_fn": lambda mean, new, _: mean.lerp_(new, 0.1)},
}


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("form", ["int8", "int4", "coded"])
def test_an_average_over_steps_takes_trained_weights_and_leaves_quantized_ones(average: str, form: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    quantize_(model, TrainWeightsConfig(form))
    plain = copy.deepcopy(model)
    dequantize_(plain)
    means = [AveragedModel(each, **AVERAGES[average]) for each in (model, plain)]
    for step in range(3):
        for each, mean in zip((model, plain), means, strict=True):
            nn.init.constant_(each[1].weight, step)
            mean.update_parameters(each)
    for (name, value), (_, expected) in zip(means[0].named_parameters(), means[1].named_parameters(), strict=True):
        if "1." in name:
            assert torch.equal(value, expected)
    assert same_stored(means[0].module[0].weight, model[0].weight)


def test_an_average_that_rounds_equal_weights_is_refused_with_one_that_does_not() -> None:
    model = nn.Sequential(nn.Linear(128, 64))
    quantize_(model, TrainWeightsConfig("int8"))
    mean = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9))
    mean.update_parameters(model)
    with pytest.raises(UnsupportedError, match=r"use lerp_, as AveragedModel does with multi_avg_fn"):
        mean.update_parameters(model)


@pytest.mark.parametrize("sources", ["another", "float"])
def test_an_average_of_unequal_quantized_weights_is_refused_before_anything_moves(sources: str) -> None:
    weight, trained = quantized_weight(), torch.zeros(4)
    other = random_weight(*weight.shape, seed=9) if sources == "float" else quantized_weight(seed=9)
    with pytest.raises(UnsupportedError, match=r"leave out weights without requires_grad"):
        torch._foreach_lerp_([trained, weight], [torch.ones(4), other], 0.5)
    assert torch.equal(trained, torch.zeros(4))
    with pytest.raises(UnsupportedError, match=r"leave out weights without requires_grad"):
        weight.lerp_(other, 0.5)
