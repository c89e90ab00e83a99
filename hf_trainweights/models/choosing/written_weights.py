"""Weights that a module's own code writes to while it computes: in a quantized weight the first write is an error.

Gemma 3n clamps a weight at each training step, and RWKV divides weights before its first inference. No attribute tells
this. So the syntax tree of the code is searched for calls such as `self.prediction_coefs.weight.data.clamp_(...)`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

# Methods that make or change a model before it computes.
_BEFORE = re.compile(r"init|reset|resize|tie_|make_weight")
# In-place methods of tensors that leave the values as they are.
_VALUELESS = {"requires_grad_", "detach_", "share_memory_"}


def written_weights(module: nn.Module) -> set[str]:
    """Return the names of the parameters of a module that methods of a class in it write to in place."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    written: set[str] = set()
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for path, is_own in _paths_written_by(type(owner)):
            # The outermost module has no name, and its parameters no dot before theirs.
            start = f"{prefix}.".removeprefix(".")
            if is_own:
                written.add(start + path)
            else:
                written |= {name for name in names if name.startswith(start) and f".{name}".endswith(f".{path}")}
    return written.intersection(names)


@functools.cache
def _paths_written_by(cls: type[nn.Module]) -> tuple[tuple[str, bool], ...]:
    """Return the attribute paths of weights that a class writes to, and for each whether it begins at `self`.

    A path that begins at another variable, such as an element of `self.blocks`, is only the end of a weight's name.
    """
    own_classes = [base for base in cls.__mro__ if not base.__module__.startswith("torch.")]
    methods = [item for base in own_classes for item in vars(base).items()]
    return tuple(path for name, method in methods if not _BEFORE.search(name) for path in _paths_in(method))


def _paths_in(method: Any) -> Iterator[tuple[str, bool]]:
    function = inspect.unwrap(method) if callable(method) else None
    names: tuple[str, ...] = getattr(getattr(function, "__code__", None), "co_names", ())
    if function is None or not any(map(_is_write, names)) or not any("weight" in name for name in names):
        return
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return  # code without a file that has it
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_write(node.func.attr):
            variable, *attributes = _chain(node.func.value)
            path = ".".join(attributes)
            if variable == "self" or len(attributes) > 1:
                yield path, variable == "self"


def _is_write(name: str) -> bool:
    in_place = name.endswith("_") and not name.startswith("_") and name not in _VALUELESS
    return in_place and callable(getattr(Tensor, name, None))


def _chain(node: ast.expr) -> list[str]:
    """Return the variable that an expression begins at and the attributes after it, without `data` and indices."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute) and node.attr != "data":
            attributes.append(node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "", *reversed(attributes)]
