"""Which ops and functions have a handler of ours for quantized weights, and the decorators that say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


# By op: the function that runs instead, from the op and its arguments to its result; NotImplemented leaves a case to
# the fallback.
HANDLERS: dict[Any, Callable[..., Any]] = {}

# By function of torch, above autograd: the function that runs instead, with the same arguments; NotImplemented leaves
# the case to the ops.
REPLACEMENTS: dict[Any, Callable[..., Any]] = {}


def implements(*ops: Any) -> Callable[[_Function], _Function]:
    """Make the decorated function the handler of ops."""

    def register(function: _Function) -> _Function:
        HANDLERS.update(dict.fromkeys(ops, function))
        return function

    return register


def replaces(replaced: Any) -> Callable[[_Function], _Function]:
    """Make the decorated function run instead of a function of torch that gets a quantized weight."""

    def register(function: _Function) -> _Function:
        REPLACEMENTS[replaced] = function
        return function

    return register
