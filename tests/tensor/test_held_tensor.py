"""No tensor that lies in memory otherwise than it says becomes part of a weight, and slices multiply as copies do."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import by_default
from torch import Tensor, nn
from weights import FORMS, KINDS, LAYOUTS, quantized_weight, random_weight, same_stored, weight_of

from hf_trainweights import QuantizedTensor
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.tensor.held_tensor import Held
from hf_trainweights.tensor.quantized_tensor import rebuild_quantized_tensor
from hf_trainweights.tensor.stored_names import (
    FoldStoredTensors,
    flatten_weight,
    group_stored,
    stored_name,
    unflatten_weight,
)
from hf_trainweights.testing.values import assert_close_product

every_form = pytest.mark.parametrize("form", FORMS)


class Subclass(Tensor):
    """A tensor that may do anything instead of what a kernel expects."""


def expanded(tensor: Tensor) -> Tensor:
    return tensor.flatten()[:1].expand(tensor.shape)


def with_gaps(tensor: Tensor) -> Tensor:
    """Return the same values, every second element of a storage."""
    apart = tensor.new_zeros(2 * tensor.numel()) if tensor.dtype.itemsize > 1 else tensor.repeat_interleave(2)
    apart = apart.flatten()
    apart[::2] = tensor.flatten()
    return apart.as_strided(tensor.shape, tuple(2 * stride for stride in tensor.contiguous().stride()))


def without_storage(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(tensor.nbytes - 1)
    return tensor


# How a tensor of the right shape and dtype can lie; and what the error finds.
FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "expanded": (expanded, r"found strides \(0, [01]\)"),
    "with gaps": (with_gaps, r"found strides \("),
    "column first": (lambda t: t.t().contiguous().t(), r"found strides \(1, 6\)"),
    "on meta": (lambda t: t.to("meta"), r"found a tensor on (meta|cpu)"),
    "of a subclass": (lambda t: t.as_subclass(Subclass), r"found a Subclass"),
    "sparse": (lambda t: t.to_sparse(), r"found a tensor of layout torch\.sparse_coo"),
    "past its storage": (without_storage, r"found one that ends at byte \d+ of \d+"),
}
# A column lies the same either way, and torch makes no sparse tensor of float8.
CASES = [("qdata", fault) for fault in FAULTS if fault != "sparse"]
CASES += [("scale", fault) for fault in FAULTS if fault != "column first"]

# Ways in that a file has, and those of a user; each gets a weight and the tensors to make one of.
DOORS: dict[str, Callable[[QuantizedTensor, dict[str, Tensor]], object]] = {
    "constructor": lambda w, tensors: QuantizedTensor(tensors, w.format, w.stored_shape, w.dtype),
    "pickle": lambda w, tensors: rebuild_quantized_tensor(
        tensors, w.format.get_config(), w.stored_shape, w.dtype, False, False
    ),
    "flat tensors": lambda w, tensors: unflatten_weight("weight", tensors, w.dtype, w.format),
    "assignment": lambda w, tensors: [setattr(w, name, tensor) for name, tensor in tensors.items()],
    "load_state_dict": lambda w, tensors: load_flat(w, tensors),
}


def load_flat(weight: QuantizedTensor, tensors: dict[str, Tensor]) -> None:
    layer = nn.Linear(128, 6, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.register_load_state_dict_pre_hook(FoldStoredTensors(weight.format))
    layer.load_state_dict({stored_name("weight", name): tensor for name, tensor in tensors.items()})


@pytest.mark.slow
@every_form
def test_no_format_is_made_of_what_lies_otherwise_than_it_says(form: str) -> None:
    for name, fault in CASES:
        weight = quantized_weight(form)
        if fault != "sparse" or weight.scale.dtype != torch.float8_e4m3fn:
            assert_kept_out("constructor", weight, name, fault)


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("name", "fault"), CASES)
def test_what_lies_otherwise_than_it_says_comes_in_by_no_door(door: str, name: str, fault: str) -> None:
    for form in ("int8", "uint4"):
        assert_kept_out(door, quantized_weight(form), name, fault)


def assert_kept_out(door: str, weight: QuantizedTensor, name: str, fault: str) -> None:
    change, found = FAULTS[fault]
    tensors = weight.tensors | {name: change(weight.tensors[name])}
    before = weight.dequantize()
    with pytest.raises(CorruptFileError, match=rf"{found}|stored plain tensors, a format"):
        DOORS[door](weight, tensors)
    assert torch.equal(weight.dequantize(), before)


class Hostile:
    """What a file can hold in the place of a weight."""

    def __init__(self, weight: QuantizedTensor, **tensors: Tensor):
        self.call, (stored, *others) = weight.__reduce_ex__(2)
        self.arguments = (stored | tensors, *others)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.arguments


@pytest.mark.slow
@every_form
def test_a_file_whose_scale_is_one_number_for_all_rows_is_refused(form: str) -> None:
    # Read by address, it would be one number and what lies behind it.
    weight, buffer = quantized_weight(form), io.BytesIO()
    torch.save(Hostile(weight, scale=expanded(weight.scale)), buffer)
    buffer.seek(0)
    with pytest.raises(CorruptFileError, match=r"scale to be a plain contiguous tensor on cpu, found strides \(0, "):
        torch.load(buffer, weights_only=True)


def test_all_tensors_may_be_on_meta_together() -> None:
    weight = quantized_weight("int4").to("meta")
    assert QuantizedTensor(weight.tensors, weight.format, weight.stored_shape, weight.dtype).is_meta


@pytest.mark.slow
@every_form
def test_slices_may_be_moved_and_copied(form: str) -> None:
    for layout in LAYOUTS:
        weight = quantized_weight(form, layout)
        rows = weight.narrow(-1 if weight.transposed else -2, 1, 4)
        assert torch.equal(rows.to(torch.bfloat16), rows.dequantize(torch.bfloat16))
        assert torch.equal(rows.clone(), rows.dequantize())
        assert rows.to("meta").shape == rows.shape


@pytest.mark.slow
@every_form
def test_slices_may_be_saved(form: str) -> None:
    for layout in LAYOUTS:
        weight = quantized_weight(form, layout)
        rows = weight.narrow(-1 if weight.transposed else -2, 1, 4)
        buffer = io.BytesIO()
        torch.save(rows, buffer)
        buffer.seek(0)
        assert same_stored(torch.load(buffer, weights_only=True), rows)
        flat = group_stored(flatten_weight("weight", rows, rows.format))["weight"]
        assert same_stored(unflatten_weight("weight", flat, rows.dtype, rows.format), rows)


# Slices

SLICES: dict[str, Callable[[Any], Any]] = {
    "w": lambda w: w,
    "w[::2]": lambda w: w[::2],
    "w[1::3]": lambda w: w[1::3],
    "w[5:10]": lambda w: w[5:10],
    "w[:1]": lambda w: w[:1],
    "w[3:4]": lambda w: w[3:4],
    "w[list]": lambda w: w[[2, 0, 2]],
    "chunk": lambda w: w.chunk(4)[2],
    "w[::2][::2]": lambda w: w[::2][::2],
    "w[::2].clone": lambda w: w[::2].clone(),
    "w.t()[:, ::2].t()": lambda w: w.t()[:, ::2].t(),
}


@pytest.mark.slow
@every_form
def test_kernels_read_a_scale_whatever_its_strides(form: str) -> None:
    weight = weight_of(FORMS[form], (64, 128), torch.bfloat16)
    apart = Held(weight.tensors | {"scale": with_gaps(weight.scale)})
    strided = QuantizedTensor.from_held(apart, weight.format, weight.stored_shape, weight.dtype)
    for rows in (1, 4, 33):
        x = random_weight(rows, 128, dtype=torch.bfloat16, seed=1)
        with torch.no_grad():
            assert torch.equal(F.linear(x, strided), F.linear(x, weight)), rows


# Every way of multiplying: compiled products, cast weights, blocks that are dequantized.
SIZES = [(16, 256), (128, 512), (1280, 1024)]


def contiguous_copy(weight: QuantizedTensor) -> QuantizedTensor:
    tensors = {name: tensor.contiguous() for name, tensor in weight.tensors.items()}
    return QuantizedTensor(tensors, weight.format, weight.stored_shape, weight.dtype)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize(
    "form", [*by_default([FORMS[kind] for kind in KINDS], FORMS.values()), Int8(activations="int8")], ids=str
)
def test_a_slice_multiplies_as_a_copy_of_it_does(form: Format, dtype: torch.dtype, size: tuple[int, int]) -> None:
    N, K = size
    # The scales of the rows differ by so much that one which is read from another place is not overlooked.
    weight = weight_of(form, size, dtype, rows=torch.logspace(-2, 2, N).unsqueeze(1))
    for take in SLICES.values():
        part = take(weight)
        copy = contiguous_copy(part)
        assert torch.equal(copy.dequantize(), take(weight.dequantize()))
        for rows in (1, 4, 33):
            assert_multiplies_alike(part, copy, random_weight(rows, K, dtype=dtype, seed=rows), form)


FEW_RESULTS = 8


def assert_multiplies_alike(part: QuantizedTensor, copy: QuantizedTensor, x: Tensor, form: Format) -> None:
    with torch.no_grad():
        plain = F.linear(x, part)
        assert torch.equal(plain, F.linear(x, copy))
        dense = copy.dequantize()
        if not getattr(form, "activations", None):
            exact, values = copy.dequantize(torch.float64), x.double()
            terms = F.linear(values.square(), exact.square()).sqrt()
            if plain.numel() >= FEW_RESULTS:
                shared = terms if form.shared_names else None
                assert_close_product(plain, F.linear(x, dense), F.linear(values, exact), shared)
            else:  # whose norm may be small by chance; each is a sum of hundreds of terms
                error = (plain.double() - F.linear(values, exact)).norm()
                assert error <= 16 * torch.finfo(plain.dtype).eps * terms.norm()
    watched = x.clone().requires_grad_()
    product = F.linear(watched, part)
    assert torch.allclose(product, plain, rtol=0.05, atol=plain.abs().max().item() / 50)
    product.sum().backward()
    assert watched.grad is not None
    assert torch.allclose(watched.grad, dense.sum(0), rtol=0.05, atol=dense.abs().max().item() / 8)
