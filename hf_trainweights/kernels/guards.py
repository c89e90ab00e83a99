"""Checks before each op that reads tensors by their address; TRAINWEIGHTS_DEBUG=1 before the import turns them on.

Such an op returns garbage or crashes the process where a tensor is not what it expects. Without the variable, a guarded
op is the op itself.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES

ENABLED = os.environ.get("TRAINWEIGHTS_DEBUG") == "1"


class Needs(NamedTuple):
    """What an op needs of one of its tensors; None may stand for any.

    Args:
        name: The argument.
        shape: A size for each dimension: a number, or a letter that stands for one size wherever the op names it.
            "*" in front stands for any leading dimensions.
        dtypes: The dtypes that the op takes.
        alignment_bytes: What divides the address of the first element.
        any_strides: Whether the op reads the strides; otherwise the tensor must be contiguous.
    """

    name: str
    shape: tuple[str | int, ...]
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
    alignment_bytes: int = 1
    any_strides: bool = False


Sizes = Mapping[str, int]


def guarded(
    name: str, *needs: Needs, rules: Mapping[str, Callable[[Sizes], bool]] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that checks the first arguments of an op before each call, or does nothing if guards are off.

    `rules` are what must hold of the sizes that the letters stand for, by a description.
    """
    if not ENABLED:
        return lambda op: op

    def decorate(op: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(op)
        def call(*args: Any, **kwargs: Any) -> Any:
            check(name, needs, args, rules or {})
            return op(*args, **kwargs)

        return call

    return decorate


def check(
    op: str, needs: tuple[Needs, ...], args: tuple[Any, ...], rules: Mapping[str, Callable[[Sizes], bool]]
) -> None:
    """Check that an op reads tensors as they are; UnsupportedError: it would not."""
    sizes: dict[str, int] = {}
    devices = [arg.device for arg in args if isinstance(arg, Tensor)]
    for need, tensor in zip(needs, args, strict=False):
        if isinstance(tensor, Tensor):
            fault = _fault(need, tensor, sizes, devices[0])
            if fault is not None:
                raise _error(f"{op}, argument {need.name}", *fault)
    for rule, holds in rules.items():
        if not holds(sizes):
            raise _error(op, rule, f"sizes {sizes}")


def _fault(need: Needs, tensor: Tensor, sizes: dict[str, int], device: torch.device) -> tuple[str, str] | None:
    """Return what was expected and found instead, None if the op can read the tensor; note its sizes."""
    shape = need.shape[1:] if need.shape[:1] == ("*",) else need.shape
    found = tuple(tensor.shape[max(0, tensor.dim() - len(shape)) :]) if shape != need.shape else tuple(tensor.shape)
    expected = tuple(sizes.get(size, size) if isinstance(size, str) else size for size in shape)
    fits = len(found) == len(shape)
    for size, actual in zip(shape, found, strict=False):
        fits = fits and actual == (sizes.setdefault(size, actual) if isinstance(size, str) else size)
    if not fits:
        return f"shape {expected}", f"{tuple(tensor.shape)}"
    if tensor.dtype not in need.dtypes:
        return f"one of {', '.join(map(str, need.dtypes))}", f"{tensor.dtype}"
    if tensor.device != device:
        return f"{device}", f"{tensor.device}"
    if not need.any_strides and not tensor.is_contiguous():
        return "a contiguous tensor", f"strides {tensor.stride()}"
    if tensor.data_ptr() % need.alignment_bytes:
        return f"an address that {need.alignment_bytes} divides", f"{tensor.data_ptr():#x}"
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end_bytes = (tensor.storage_offset() + steps + 1) * tensor.element_size() if tensor.numel() else 0
    storage_bytes = tensor.untyped_storage().nbytes()
    return (f"a storage of {end_bytes} bytes", f"{storage_bytes}") if end_bytes > storage_bytes else None


def _error(where: str, expected: str, found: str) -> UnsupportedError:
    return UnsupportedError(
        where, expected, found, "Report this with the traceback: hf_trainweights should not have made this call."
    )
