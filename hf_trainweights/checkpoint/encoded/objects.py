"""The few classes of other packages whose objects lie in checkpoints, beside plain values and tensors.

They are DeepSpeed's, and the projectors that GaLore and APOLLO keep among the states of a parameter. A file names a
class, and only the classes of this module are ever made from a file. None of them runs code when it is made so: an
object of `_RECORDS` gets its attributes, a member of `_ENUMS` is found by its number.

If the package is not installed, a class of the same name and the same attributes stands for each of them.
"""

from __future__ import annotations

import functools
import importlib
import sys
from importlib.util import find_spec
from typing import Any

_RECORDS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "galore_torch.galore_projector.GaLoreProjector",
    "apollo_torch.svd_projector.GaLoreProjector",
    "apollo_torch.random_projector.GradientProjector",
)
_ENUMS = ("deepspeed.runtime.zero.config.ZeroStageEnum",)


def object_name(value: object) -> str | None:
    """Return the name of a value's class if it is one of this module, else None."""
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    return name if name in (*_RECORDS, *_ENUMS) else None


def object_state(value: Any) -> dict[str, Any] | int:
    """Return the attributes of an object of such a class, or the number of a member."""
    return int(value) if object_name(value) in _ENUMS else dict(vars(value))


def build_object(name: object, state: Any) -> Any:
    """Make an object of a class's name and an `object_state`; ValueError: no class of this module has them."""
    if name in _ENUMS and type(state) is int:
        return _class_of(str(name))(state)
    if name not in _RECORDS or type(state) is not dict or not all(type(key) is str for key in state):
        raise ValueError(f"{name} with such a state")
    cls = _class_of(str(name))
    made = cls.__new__(cls)
    made.__dict__.update(state)
    return made


def stand_ins() -> list[Any]:
    """Return a stand-in of each class of this module, with its name, for `torch.serialization.safe_globals`.

    None of their packages is imported for it.
    """
    return [(_stand_in(name), name) for name in (*_RECORDS, *_ENUMS)]


def missing_packages(tree: Any) -> set[str]:
    """Return the packages of objects in a structure's `tree` that are not installed, so they cannot be pickled."""
    missing: set[str] = set()
    open_nodes = [tree]
    while open_nodes:
        node = open_nodes.pop()
        name = (node.get("object") or [None])[0] if isinstance(node, dict) else None
        package = name.partition(".")[0] if name in (*_RECORDS, *_ENUMS) else None
        if package and package not in sys.modules and find_spec(package) is None:
            missing.add(package)
        open_nodes += node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return missing


@functools.cache
def _class_of(name: str) -> Any:
    module, _, own_name = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), own_name)
    except Exception:  # the package is not installed, or raises anything where it does not suit the machine
        return _stand_in(name)


@functools.cache
def _stand_in(name: str) -> type:
    module, _, own_name = name.rpartition(".")
    return type(own_name, (int,) if name in _ENUMS else (), {"__module__": module})
