"""The ops by which programs of torch.compile multiply on a CPU: PyTorch's dispatcher calls C, and no Python runs.

A program is the graph of ops that torch.compile makes of a model's code. `native/ops/products.c` has three such ops:
`bare_product` takes codes and scales, `product` takes a bias and two more stored tensors, and `imported_product` serves
formats of other programs. If they are not compiled, the op `hf_trainweights::linear` serves, which runs in Python.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from hf_trainweights.formats.base import Format
from hf_trainweights.kernels import compiled, native_ops
from hf_trainweights.kernels.arguments import MultiplyFew
from hf_trainweights.kernels.compiled import Product
from hf_trainweights.kernels.cpu_features import ALL

# The bits that each field of `Weight` but N takes in an argument, the first field in the lowest bits: the dispatcher
# takes a time for each argument, so one integer holds several fields. Formats of other programs have a second argument
# for the last fields.
_WIDTHS = ((17, 17, 2, 2, 2, 4, 8, 8, 1), (2, 4, 3, 4, 1, 17))
# The optional tensors that each op takes, the bias and stored tensors, and its numbers.
_OPS = {
    "bare_product": (0, ("weight",)),
    "product": (1 + 2, ("weight",)),
    "imported_product": (1 + compiled.OTHERS, ("weight", "imported")),
}


class _BuiltinOverload(OpOverload):
    """An op that Python calls as a builtin: `OpOverload.__call__` takes .3 us, and does no more than this."""


def multiply(x: Tensor, tensors: Sequence[Tensor], form: Format, bias: Tensor | None) -> Tensor | None:
    """Return the product as an op of a program, or None if the op does not serve these arguments.

    Args:
        x: `[*, K]`, a tensor that a compiler traces with, on the CPU.
        tensors: The stored tensors of a weight `[N, K]`, in the order of the format's `tensor_names`; contiguous.
        form: Their format.
        bias: `[N]` or None.
    """
    N, K = form.shape_of(tensors[0])
    if not (type(N) is type(K) is int) or x.dim() == 0:  # a compiler may trace with symbols for sizes
        return None
    product = compiled.find(form, N, K, x.dtype, tensors[1].dtype)
    if product is None or not serves(product):
        return None
    M = x.numel() // K
    if product.most_rows < ALL and not (type(M) is int and product.most_rows >= M):
        return None
    qdata, scale, *others = tensors
    biases = () if bias is None else (bias.contiguous(),)
    op, arguments = bind(product, others, bool(biases))
    return op(x.contiguous(), qdata, scale, *biases, *arguments)


def bind(product: Product, others: Sequence[Tensor], biased: bool) -> tuple[Any, tuple[Tensor | int | None, ...]]:
    """Return the op for weights of a product, and its arguments behind x, codes, scales and the bias if there is one.

    Args:
        product: The product of the weights.
        others: The stored tensors behind codes and scales, in the order of the format's `tensor_names`.
        biased: Whether the caller passes a bias.
    """
    own_widths, imported_widths = _WIDTHS
    own = _pack(product.numbers[: len(own_widths)], own_widths)
    imported = _pack(product.numbers[len(own_widths) :], imported_widths)
    # 0 describes no format of another program: `family` is 0.
    name = "imported_product" if imported else "product" if biased or others else "bare_product"
    count, _ = _OPS[name]
    no_bias = () if biased or not count else (None,)
    missing = (None,) * (count - 1 - len(others))
    return _ops()[name], (*no_bias, *others, *missing, own, *((imported,) if imported else ()))


def _pack(values: Sequence[int], widths: Sequence[int]) -> int:
    packed = 0
    for value, width in zip(reversed(values), reversed(widths), strict=True):
        assert 0 <= value < 1 << width
        packed = packed << width | value
    return packed


def serves(product: Product) -> bool:
    """Return whether an op calls the library of a product."""
    return _register(product.library)


def prepare(product: Product, qdata: Tensor, scale: Tensor, groups: Sequence[Tensor]) -> MultiplyFew | None:
    """Return a function from x and bias to the product, or to None if the op does not serve them.

    None in its place if there is no op. The op checks its arguments itself: the same checks in Python would take as
    long as a small product.
    """
    if not serves(product):
        return None
    op, arguments = bind(product, groups, biased=False)
    biased_op, biased_arguments = bind(product, groups, biased=True)
    most_elements = min(sys.maxsize, product.most_rows * product.columns)

    def multiply_prepared(x: Tensor, bias: Tensor | None) -> Tensor | None:
        if not x.is_cpu or x.numel() > most_elements:
            return None
        try:
            if bias is None:
                return op(x, qdata, scale, *arguments)
            return biased_op(x, qdata, scale, bias, *biased_arguments)
        except RuntimeError:
            return None

    return multiply_prepared


def describe() -> str:
    """Return a part of the keys of cached programs: a text that changes if programs would call the op otherwise."""
    library = compiled.loaded_library()
    return f"{[_schema(name) for name in _OPS]}, {compiled.describe()}, {library is not None and _register(library)}"


def _register(library: ctypes.CDLL) -> bool:
    """Let the ops call a library of products, and return whether they do."""
    _ops()
    return native_ops.serve(library, tuple(_OPS))


@functools.cache
def _ops() -> dict[str, Any]:
    """Define the ops in PyTorch's dispatcher, and return them by name."""
    ops: dict[str, Any] = {}
    for name in _OPS:
        _LIBRARY.define(_schema(name), tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
        # Programs and `prepare` call the op below autograd. PyTorch would look for a gradient of it at each call.
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"hf_trainweights::{name}", _empty, lib=_LIBRARY)
        ops[name] = op = getattr(torch.ops.hf_trainweights, name).default
        op.__class__ = type("_BuiltinOverload", (_BuiltinOverload,), {"__call__": op._op})
    return ops


def _schema(name: str) -> str:
    count, numbers = _OPS[name]
    optional = ["bias", *(f"other_{index}" for index in range(count - 1))] if count else []
    tensors = "Tensor x, Tensor qdata, Tensor scale" + "".join(f", Tensor? {tensor}" for tensor in optional)
    return f"{name}({tensors}, int {', int '.join(numbers)}) -> Tensor"


def _empty(x: Tensor, qdata: Tensor, scale: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], scale.shape[0]))


_LIBRARY = torch.library.Library("hf_trainweights", "FRAGMENT")
