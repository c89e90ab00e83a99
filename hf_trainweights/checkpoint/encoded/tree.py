"""A tree of Python values and tensors <-> JSON and a list of storages: what `torch.save` keeps, as data.

| value | node |
|---|---|
| None, bool, int, str, finite float | itself |
| NaN, infinity | `{"float": "7ff8000000000000"}`, the eight bytes of the double, big-endian |
| list | an array |
| tuple, torch.Size | `{"tuple": [...]}`, `{"size": [...]}` |
| dict, OrderedDict, Counter | `{"dict": [[key, value], ...]}`, `{"ordered_dict": ...}`, `{"counter": ...}` |
| torch.dtype, torch.device | `{"dtype": "float32"}`, `{"device": "cuda:0"}` |
| tensor, parameter | `{"tensor": index}`; the same object twice has the same index |

An OrderedDict brings the `_metadata` of a module's state dict as a second entry, `"metadata": node`. Of a
tensor its values, dtype, layout, `requires_grad` and its being a parameter are kept; attributes and hooks
are not. How a tensor views its storage is described in storages.py.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import Json
from hf_trainweights.checkpoint.encoded.storages import (
    DTYPES,
    Key,
    KeyPath,
    Storage,
    build_tensors,
    corrupt,
    find_storages,
    path_text,
)
from hf_trainweights.errors import UnstorableError

# Real training state is about 6 deep. Python gives up near 1000 frames; a hostile file must not get it there.
MAX_DEPTH = 64
# numpy's PCG64 state, the longest integer in training state, has 128 bits; Python refuses to print 14,000.
_MAX_INT_BITS = 4096

_SCALARS = (bool, int, str, float)
_MAPPING_KINDS: dict[type, str] = {dict: "dict", OrderedDict: "ordered_dict", Counter: "counter"}
MAPPING_TYPES = {kind: mapping_type for mapping_type, kind in _MAPPING_KINDS.items()}

_CONSTANTS: dict[str, Callable[[Any], Any]] = {
    "float": lambda digits: struct.unpack(">d", bytes.fromhex(digits))[0],
    "dtype": DTYPES.__getitem__,
    "device": torch.device,
    "size": torch.Size,
}


def flatten(tree: Any) -> tuple[dict[str, Any], list[Storage]]:
    """Take a tree apart: `{"tree": node, "tensors": [view, ...]}`, ready for JSON, and the storages that it views.

    UnstorableError names the key path of a value that is not in this module's table, or contains itself.

    Examples:
        >>> structure, storages = flatten({"lr": 0.1, "step": torch.tensor(3.0)})
        >>> structure
        {'tree': {'dict': [['lr', 0.1], ['step', {'tensor': 0}]]}, 'tensors': [{'storage': 0}]}
    """
    flattener = _Flattener()
    node = flattener.node(tree, ())
    views, storages = find_storages(flattener.tensors, flattener.paths)
    return {"tree": node, "tensors": views}, storages


def unflatten(structure: Mapping[str, Any], storages: Sequence[Tensor]) -> Any:
    """Put a tree together again, of `storages` of the right shapes and dtypes on any device, whose memory it shares.

    CorruptFileError: a node or a view is not as `flatten` leaves it.
    """
    return _value(structure.get("tree"), build_tensors(structure.get("tensors"), storages), ())


def _is_key(value: object) -> TypeGuard[Key]:
    return value is None or type(value) in _SCALARS


@dataclass
class _Flattener:
    tensors: list[Tensor] = field(default_factory=list)
    paths: list[list[KeyPath]] = field(default_factory=list)
    _indices: dict[int, int] = field(default_factory=dict)
    _open: list[int] = field(default_factory=list)

    def node(self, value: Any, path: KeyPath) -> Json:
        kind = type(value)
        if _is_key(value):
            return _scalar_node(value, path)
        if isinstance(value, Tensor):
            return {"tensor": self._tensor_index(value, path)}
        if kind is torch.dtype and str(value).removeprefix("torch.") in DTYPES:
            return {"dtype": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"device": str(value)}
        if kind is torch.Size:
            return {"size": list(value)}
        if kind is list or kind is tuple or kind in _MAPPING_KINDS:
            return self._container_node(value, path)
        expected = "a scalar, list, tuple, dict, torch.dtype, torch.device, torch.Size or tensor"
        next_step = "Convert it, e.g. with float(), list() or torch.as_tensor(), or leave it out."
        found = f"{kind.__module__}.{kind.__qualname__}"
        raise UnstorableError(path_text(path), expected, found, next_step)

    def _container_node(self, value: Any, path: KeyPath) -> Json:
        if id(value) in self._open or len(self._open) == MAX_DEPTH:
            found = "a container that contains itself" if id(value) in self._open else "a deeper one"
            raise UnstorableError(path_text(path), f"a tree at most {MAX_DEPTH} deep", found, "Flatten it.")
        self._open.append(id(value))
        node = self._mapping_node(value, path) if type(value) in _MAPPING_KINDS else self._sequence_node(value, path)
        self._open.pop()
        return node

    def _sequence_node(self, sequence: Sequence[Any], path: KeyPath) -> Json:
        items: list[Json] = [self.node(item, (*path, index)) for index, item in enumerate(sequence)]
        return items if type(sequence) is list else {"tuple": items}

    def _mapping_node(self, mapping: Mapping[Any, Any], path: KeyPath) -> dict[str, Json]:
        items: Json = []
        for key, value in mapping.items():
            if not _is_key(key):
                found = f"{type(key).__qualname__} {key!r}"[:80]
                raise UnstorableError(path_text(path), "keys that are scalars", found, "Use a str.")
            items.append([_scalar_node(key, path), self.node(value, (*path, key))])
        node: dict[str, Json] = {_MAPPING_KINDS[type(mapping)]: items}
        attributes = dict(getattr(mapping, "__dict__", {}))
        if "_metadata" in attributes:
            node["metadata"] = self.node(attributes.pop("_metadata"), (*path, "_metadata"))
        if attributes:
            found = f"attributes {', '.join(attributes)}"
            raise UnstorableError(path_text(path), "a dict without attributes", found, "Use a plain dict.")
        return node

    def _tensor_index(self, tensor: Tensor, path: KeyPath) -> int:
        index = self._indices.setdefault(id(tensor), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(tensor)
            self.paths.append([])
        self.paths[index].append(path)
        return index


def _scalar_node(value: Key, path: KeyPath) -> Json:
    if type(value) is float and not math.isfinite(value):
        return {"float": struct.pack(">d", value).hex()}
    if type(value) is int and value.bit_length() > _MAX_INT_BITS:
        expected, found = f"an integer of at most {_MAX_INT_BITS} bits", f"{value.bit_length()} bits"
        raise UnstorableError(path_text(path), expected, found, "Store it as a str.")
    return value


def _value(node: Any, tensors: Sequence[Tensor], path: KeyPath) -> Any:
    # The path becomes text in errors alone: a long key above a long list would be copied for each item.
    if len(path) > MAX_DEPTH:
        raise corrupt(path_text(path), f"a tree at most {MAX_DEPTH} deep", "a deeper one")
    if _is_key(node):
        return node
    if type(node) is list:
        return [_value(item, tensors, (*path, index)) for index, item in enumerate(node)]
    if type(node) is not dict or not node:
        raise corrupt(path_text(path), "a node", node)
    kind, content = next(iter(node.items()))
    if kind in MAPPING_TYPES:
        return _mapping(kind, node, tensors, path)
    if kind == "tuple" and type(content) is list:
        return tuple(_value(item, tensors, (*path, index)) for index, item in enumerate(content))
    if kind == "tensor" and type(content) is int and 0 <= content < len(tensors):
        return tensors[content]
    try:
        return _CONSTANTS[kind](content)
    except (KeyError, OverflowError, RuntimeError, TypeError, ValueError, struct.error) as error:
        raise corrupt(path_text(path), "a node", node) from error


def _mapping(kind: str, node: dict[str, Any], tensors: Sequence[Tensor], path: KeyPath) -> Any:
    items = node[kind]
    if type(items) is not list or not all(type(item) is list and len(item) == 2 for item in items):
        raise corrupt(path_text(path), "pairs of key and value", items)
    mapping = MAPPING_TYPES[kind]()
    for key_node, value_node in items:
        key = _value(key_node, (), path)
        if not _is_key(key):
            raise corrupt(path_text(path), "a scalar key", key)
        if key in mapping:
            raise corrupt(path_text((*path, key)), "each key once", "it twice")
        mapping[key] = _value(value_node, tensors, (*path, key))
    if type(mapping) is OrderedDict and "metadata" in node:
        mapping.__dict__["_metadata"] = _value(node["metadata"], tensors, (*path, "_metadata"))
    return mapping
