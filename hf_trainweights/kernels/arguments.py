"""Checks of the tensors of a product: x, the weight's stored tensors and the bias.

A compiled function reads them by their addresses. It returns garbage or crashes the process if a tensor has another
shape, dtype or layout than it expects. Stored tensors are checked when they become a weight. Callers choose x and the
bias, so these are checked at each product. TRAINWEIGHTS_DEBUG=1, set before the import, makes each product check all
its tensors.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from hf_trainweights.errors import CorruptFileError, UnsupportedError
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.native_library import address_of

DEBUG = os.environ.get("TRAINWEIGHTS_DEBUG") == "1"

# From x `[*, K]` and a bias `[N]` or None to the product `[*, N]`, or to None if it does not take these arguments.
MultiplyFew = Callable[[Tensor, Tensor | None], Tensor | None]


def is_plain(*tensors: Tensor | None) -> bool:
    """Return whether all tensors are plain, unlike those that compilers trace with, which have no values."""
    for tensor in tensors:
        if tensor is not None and type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
            return False
    return True


def is_input(x: Tensor, columns: int, dtype: torch.dtype) -> bool:
    """Return whether x is a dense tensor `[*, columns]` of a dtype."""
    return x.dtype == dtype and not x.is_nested and x.layout == torch.strided and x.dim() > 0 and x.shape[-1] == columns


def is_bias(bias: Tensor | None, rows: int, dtype: torch.dtype) -> bool:
    """Return whether a bias is None, or a tensor `[rows]` of a dtype."""
    return bias is None or (bias.shape == (rows,) and bias.dtype == dtype)


def only_fitting(
    multiply: MultiplyFew, held: Mapping[str, Tensor], form: Format, dtype: torch.dtype, most_rows: int
) -> MultiplyFew:
    """Return a function that calls `multiply` if it can read x and bias by their addresses, and else returns None."""
    (N, K), device = form.shape_of(held["qdata"]), held["qdata"].device
    most_elements = min(sys.maxsize, most_rows * K)  # `most_rows` may be `ALL`, which is sys.maxsize

    # One function without inner calls: each takes .05 us of a small product.
    def checked(x: Tensor, bias: Tensor | None) -> Tensor | None:
        if x.dtype is not dtype or x.is_nested or x.dim() == 0 or x.size(-1) != K:
            return None
        if not (0 < x.numel() <= most_elements and x.device == device and x.is_contiguous()) or x.is_neg():
            return None
        if bias is not None and not (
            bias.dtype is dtype
            and bias.dim() == 1
            and bias.size(0) == N
            and bias.device == device
            and bias.is_contiguous()
            and not bias.is_neg()
        ):
            return None
        if DEBUG:
            check_product("a prepared product", x, held, form, bias)
        return multiply(x, bias)

    return checked


def addresses_of(*tensors: Tensor | None) -> list[int | None]:
    """Return the addresses of tensors that have elements; None for None. UnsupportedError: a storage was freed."""
    addresses = [address_of(tensor) for tensor in tensors]
    if 0 in addresses:  # `fully_shard` frees parameters between products
        raise UnsupportedError(
            "F.linear",
            "an input, a weight and a bias that are in memory",
            "one whose storage was freed (untyped_storage().resize_(0))",
            "Multiply before it is freed, or after it was gathered or computed again.",
        )
    return addresses


def check_allocated(*tensors: Tensor | None) -> None:
    """Raise UnsupportedError if a tensor has elements but no memory; many ops of PyTorch would end the process."""
    addresses_of(*(tensor for tensor in tensors if tensor is not None and tensor.numel()))


def check_stored(tensors: Mapping[str, Tensor], form: Format, shape: Sequence[int], name: str = "weight") -> None:
    """Check that products may read a format's tensors of a weight `[*, N, K]` by address; else raise CorruptFileError.

    Shape and dtype do not tell where a tensor's bytes lie. PyTorch's products take the address of a scale and read on
    from there, whatever its strides say. If one number was expanded to a column, they read past its end.
    """
    *lead, N, K = shape
    # `fallback` returns the format to which a weight of this shape would be quantized. For a single row some formats
    # return another one, but this row may be cut out of a larger weight. So the question is about two rows at least.
    if form.fallback((*lead, max(N, 2), K)) != form:
        next_step = "The file is damaged or belongs to another model; save it again from the source."
        raise CorruptFileError(name, f"columns that {form} can hold", f"{K}", next_step)
    form.check(tensors, shape, name)
    device = tensors["qdata"].device
    for key in form.tensor_names:
        fault = _fault(tensors[key], device)
        if fault is not None:
            raise CorruptFileError(
                name,
                f"{key} to be a plain contiguous tensor on {device}",
                fault,
                "Call .contiguous() on a tensor that you made; where it comes from a file, the file is damaged.",
            )


def check_product(
    op: str, x: Tensor, tensors: Mapping[str, Tensor], form: Format, bias: Tensor | None, any_strides: bool = False
) -> None:
    """Check that a product can read its tensors; x and the bias need not be contiguous if `any_strides`.

    Errors begin with `op`, the name of the product.
    """
    shape = form.shape_of(tensors["qdata"])
    specs = form.tensor_specs(shape, tensors["scale"].dtype)
    for name, (size, dtype) in specs.items():
        _check_argument(f"{op}, argument {name}", tensors[name], size, (dtype,), x.device)
    _check_argument(f"{op}, argument x", x, (*x.shape[:-1], shape[-1]), FLOAT_DTYPES, x.device, any_strides)
    if bias is not None:
        _check_argument(f"{op}, argument bias", bias, shape[:1], (x.dtype,), x.device, any_strides)


def _check_argument(
    where: str,
    tensor: Tensor,
    size: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    any_strides: bool = False,
) -> None:
    fault = _fault(tensor, device, any_strides)
    if tensor.shape != size:
        expected, actual = f"shape {size}", f"{tuple(tensor.shape)}"
    elif tensor.dtype not in dtypes:
        expected, actual = f"one of {', '.join(map(str, dtypes))}", f"{tensor.dtype}"
    elif fault is not None:
        expected, actual = f"a plain {'' if any_strides else 'contiguous '}tensor on {device}", fault
    else:
        return
    next_step = "Report this with the traceback: hf_trainweights should not have made this call."
    raise UnsupportedError(where, expected, actual, next_step)


def _fault(tensor: Tensor, device: torch.device, any_strides: bool = False) -> str | None:
    """Return the reason why a tensor cannot be read by its address, or None."""
    if not is_plain(tensor):
        return f"a {type(tensor).__name__}"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.device != device:
        return f"a tensor on {tensor.device}"
    if not any_strides and (tensor.is_neg() or not tensor.is_contiguous()):
        return f"strides {tensor.stride()}{' and a negated view' * tensor.is_neg()}"
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end_bytes = (tensor.storage_offset() + steps + 1) * tensor.element_size() if tensor.numel() else 0
    storage_bytes = tensor.untyped_storage().nbytes()
    return f"one that ends at byte {end_bytes} of {storage_bytes}" if end_bytes > storage_bytes else None
