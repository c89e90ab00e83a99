"""The dispatch of an op that gets a quantized weight: its handler runs, or the op runs on the dequantized weight.

Quantized weights are of the class `QuantizedTensor`, whose base `HeldTensor` stands for it here.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.tensor.held_tensor import HeldTensor
from hf_trainweights.tensor.read_only import HOW_TO_CHANGE, read_only, views_as_read_only, written

_Function = TypeVar("_Function", bound=Callable[..., Any])

# The handler of each op. It is called with the op and its arguments; if it returns NotImplemented, the weight is
# dequantized and the op itself runs.
HANDLERS: dict[Any, Callable[..., Any]] = {}

# The replacement of each function of torch, which runs before autograd sees the call. It is called with the function's
# arguments; if it returns NotImplemented, the function itself runs and calls ops.
REPLACEMENTS: dict[Any, Callable[..., Any]] = {}

# Fast replacements, which are tried before `REPLACEMENTS` and return None to leave the call to those. A replacement
# runs in a context that makes the weight's shape and other attributes quick to read. Entering it takes half a
# microsecond; these run outside of it, and read only attributes of Python.
AT_ONCE: dict[Any, Callable[..., Any]] = {}

# How often each op without a handler has dequantized its weights in this process.
FALLBACKS: Counter[str] = Counter()

# Advice for people who average weights over training steps. `lerp_` leaves equal weights exactly as they are.
OF_AVERAGES = (
    "To average a model over training steps, leave out weights without requires_grad, or use lerp_, as AveragedModel "
    "does with multi_avg_fn=get_ema_multi_avg_fn()."
)

_logger = logging.getLogger(__name__)
_LOG_FALLBACKS = os.environ.get("TRAINWEIGHTS_LOG_FALLBACK") == "1"


def implements(*ops: Any) -> Callable[[_Function], _Function]:
    """Make the decorated function the handler of ops."""
    return functools.partial(_register, HANDLERS, ops)


def replaces(*replaced: Any) -> Callable[[_Function], _Function]:
    """Make the decorated function run instead of functions of torch that get a quantized weight."""
    return functools.partial(_register, REPLACEMENTS, replaced)


def _register(table: dict[Any, Callable[..., Any]], keys: tuple[Any, ...], function: _Function) -> _Function:
    table.update(dict.fromkeys(keys, function))
    return function


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op that has a quantized weight among its arguments."""
    handler = HANDLERS.get(func)
    result = NotImplemented if handler is None else handler(func, *args, **kwargs)
    return _fall_back(func, args, kwargs) if result is NotImplemented else result


def _fall_back(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Schemas of collectives do not say which arguments they write to. Whatever they wrote to a dequantized copy of the
    # weight would be lost without a word.
    if func.namespace == "c10d":
        raise unsupported_collective(func)
    for value in written(func, args, kwargs):
        if isinstance(value, HeldTensor):
            raise unsupported_in_place(str(func), value)
    # Under inference_mode an op such as mT or narrow is not yet decomposed into the transpose or slice with a handler.
    result = func.decompose(*args, **kwargs)
    if result is not NotImplemented:
        return result
    FALLBACKS[str(func)] += 1
    if _LOG_FALLBACKS:
        _logger.warning("%s has no handler for quantized weights: dequantized (%d)", func, FALLBACKS[str(func)])
    result = compute_dequantized(func, *args, **kwargs)
    # `contiguous` and `flatten` clone a weight that is stored transposed, but are views of a float weight.
    return read_only(result) if func is torch.ops.aten.clone.default else views_as_read_only(func, result)


def unsupported_collective(func: Any) -> UnsupportedError:
    """Return the error for a collective that would send a quantized weight as it is."""
    return UnsupportedError(
        str(func),
        "plain tensors",
        "a quantized weight, whose float values are nowhere in memory",
        "Let every rank load the model, and load_state_dict or set_model_state_dict without broadcast_from_rank0. To "
        "send a weight yourself, send the tensors in weight.tensors one by one.",
    )


def unsupported_in_place(where: str, weight: HeldTensor) -> UnsupportedError:
    """Return the error for an op that would change a quantized weight in place."""
    return UnsupportedError(
        where,
        "an op that leaves the quantized weight as it is",
        f"an in-place op on {weight!r}",
        f"{HOW_TO_CHANGE} {OF_AVERAGES} If a module's own code does this, name the module in modules_to_not_convert "
        "when the float model is quantized.",
    )


def compute_dequantized(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an op with its quantized arguments, at any depth, dequantized."""
    args, kwargs = tree_map_only(HeldTensor, lambda tensor: tensor.dequantize(), (args, kwargs))
    return func(*args, **kwargs)
