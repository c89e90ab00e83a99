"""Which ops and functions have a handler of ours for quantized weights, and the decorators that say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Handler(NamedTuple):
    """The function that runs instead of an op.

    Args:
        function: From the op and its arguments to its result; NotImplemented for a case that it leaves to the fallback.
        any_layout: Whether it takes weights in a kernel's private layout. Others get them as their stored tensors.
    """

    function: Callable[..., Any]
    any_layout: bool


# By op.
HANDLERS: dict[Any, Handler] = {}

# By function of torch, above autograd: the function that runs instead, with the same arguments; NotImplemented leaves
# the case to the ops.
REPLACEMENTS: dict[Any, Callable[..., Any]] = {}


def implements(*ops: Any, any_layout: bool = False) -> Callable[[_Function], _Function]:
    """Make the decorated function the handler of ops.

    Args:
        ops: Overloads such as `torch.ops.aten.t.default`.
        any_layout: As for `Handler`.
    """

    def register(function: _Function) -> _Function:
        HANDLERS.update(dict.fromkeys(ops, Handler(function, any_layout)))
        return function

    return register


def replaces(replaced: Any) -> Callable[[_Function], _Function]:
    """Make the decorated function run instead of a function of torch that gets a quantized weight.

    Args:
        replaced: The function as `__torch_function__` gets it, e.g. `F.linear`.
    """

    def register(function: _Function) -> _Function:
        REPLACEMENTS[replaced] = function
        return function

    return register
