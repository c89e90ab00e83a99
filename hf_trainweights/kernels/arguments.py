"""Checks of the arguments of `F.linear`, made before a compiled function reads them by their addresses.

Such a function returns garbage or crashes the process if a tensor has another shape, dtype or layout than it expects.
Callers choose x and the bias, so these are always checked. TRAINWEIGHTS_DEBUG=1, set before the import, makes each
product check all its tensors.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format

DEBUG = os.environ.get("TRAINWEIGHTS_DEBUG") == "1"

# From x `[*, K]` and a bias `[N]` or None to the product `[*, N]`, or to None if it does not take these arguments.
MultiplyFew = Callable[[Tensor, Tensor | None], Tensor | None]


def only_fitting(
    multiply: MultiplyFew, held: Mapping[str, Tensor], form: Format, dtype: torch.dtype, most_rows: int
) -> MultiplyFew:
    """Return a function that calls `multiply` if it can read x and bias by their addresses, and else returns None."""
    (N, K), device = form.shape_of(held["qdata"]), held["qdata"].device
    most_elements = min(sys.maxsize, most_rows * K)

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


def check_allocated(*tensors: Tensor | None) -> None:
    """Raise `storage_freed` if a tensor has elements but no memory; many ops of PyTorch would end the process."""
    for tensor in tensors:
        if tensor is not None and tensor.numel() and not tensor.data_ptr():
            raise storage_freed()


def storage_freed() -> UnsupportedError:
    """Return the error for a tensor whose storage was freed. `fully_shard` frees parameters between products."""
    return UnsupportedError(
        "F.linear",
        "an input, a weight and a bias that are in memory",
        "one whose storage was freed (untyped_storage().resize_(0))",
        "Multiply before it is freed, or after it was gathered or computed again.",
    )


def check_product(
    op: str, x: Tensor, tensors: Mapping[str, Tensor], form: Format, bias: Tensor | None, any_strides: bool = False
) -> None:
    """Check that a product can read its tensors; x and the bias need not be contiguous if `any_strides`."""
    shape = form.shape_of(tensors["qdata"])
    specs = form.tensor_specs(shape, tensors["scale"].dtype)
    faults = {name: _fault(tensors[name], size, (dtype,), False, x.device) for name, (size, dtype) in specs.items()}
    faults["x"] = _fault(x, (*x.shape[:-1], shape[-1]), FLOAT_DTYPES, any_strides, x.device)
    faults["bias"] = None if bias is None else _fault(bias, shape[:1], (x.dtype,), any_strides, x.device)
    for name, fault in faults.items():
        if fault is not None:
            next_step = "Report this with the traceback: hf_trainweights should not have made this call."
            raise UnsupportedError(f"{op}, argument {name}", *fault, next_step)


def _fault(
    tensor: Tensor, size: tuple[int, ...], dtypes: tuple[torch.dtype, ...], any_strides: bool, device: torch.device
) -> tuple[str, str] | None:
    """Return the expected and the actual property of a tensor that a product cannot read; None if it can."""
    if tensor.shape != size:
        return f"shape {size}", f"{tuple(tensor.shape)}"
    if tensor.dtype not in dtypes:
        return f"one of {', '.join(map(str, dtypes))}", f"{tensor.dtype}"
    if tensor.device != device:
        return f"{device}", f"{tensor.device}"
    if not any_strides and not tensor.is_contiguous():
        return "a contiguous tensor", f"strides {tensor.stride()}"
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end_bytes = (tensor.storage_offset() + steps + 1) * tensor.element_size() if tensor.numel() else 0
    storage_bytes = tensor.untyped_storage().nbytes()
    return (f"a storage of {end_bytes} bytes", f"{storage_bytes}") if end_bytes > storage_bytes else None
