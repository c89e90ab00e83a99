"""Turns a tree of Python values and tensors into JSON and a list of storages, and back.

The JSON holds as data the values that `torch.save` would pickle:

| value | node |
|---|---|
| None, bool, int, str, finite float | itself |
| NaN, infinity | `{"float": "7ff8000000000000"}`, the eight bytes of the double, big-endian |
| list | an array |
| tuple, torch.Size | `{"tuple": [...]}`, `{"size": [...]}` |
| dict, OrderedDict, Counter | `{"dict": [[key, value], ...]}`, `{"ordered_dict": ...}`, `{"counter": ...}` |
| torch.dtype, torch.device | `{"dtype": "float32"}`, `{"device": "cuda:0"}` |
| object of a known class | `{"object": ["deepspeed...LossScaler", node]}`, see objects.py |
| tensor, parameter | `{"tensor": index}`; the same object twice has the same index |

The node of an OrderedDict has a second entry, `"metadata": node`, if the dict has the `_metadata` of a module's state
dict. A tensor keeps its values, dtype, layout and `requires_grad`, and is a parameter again if it was one. It loses
other attributes and hooks.

A tensor is a view, `{"storage": 3, "shape": [2, 2], "stride": [1, 2], "offset": 4, "requires_grad": true, "parameter":
true}`. Left out are a shape that equals the storage's, strides that are row-major, an offset of 0, and false. Tensors
that share memory share a storage, so a write through one shows in the other. A storage holds only the elements that its
views span, and the gaps between views are closed: a small view of a large tensor does not drag the rest along. Errors
name a tensor by its key path, the keys that lead to it from the top of the tree.

A tensor in pieces (storages.py) is a view of several storages, `{"joined": [3, 4], "shape": [2, 2]}`. It has their
elements one after the other, in memory of its own. A storage belongs to one such view at most.
"""

from __future__ import annotations

import math
import reprlib
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import ALL_DTYPES, Json
from hf_trainweights.checkpoint.encoded.objects import build_object, object_name, object_state
from hf_trainweights.checkpoint.encoded.storages import Joined, Storage, join, repeated
from hf_trainweights.errors import CorruptFileError, UnstorableError

Key = str | int | float | bool | None
KeyPath = tuple[Key, ...]

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in ALL_DTYPES}
_MAX_DIMENSIONS = 64  # torch's own limit
_MAX_ELEMENTS = 1 << 62  # torch counts elements in int64

# Errors show so much of a key. Names of parameters have about 100 characters, but a hostile file may have a key of a
# megabyte above many tensors.
_SHOWN_CHARACTERS = 500

# Real training state is about 6 deep. Python gives up near 1000 frames, and a hostile file must not get it there.
MAX_DEPTH = 64
# The longest integer in training state, numpy's PCG64 state, has 128 bits. Python refuses to print 14,000 bits.
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


def path_text(path: KeyPath) -> str:
    """Return a key path as people write it, e.g. `state.0.exp_avg`, each key cut after 500 characters."""
    return ".".join(str(key)[:_SHOWN_CHARACTERS] for key in path) or "the value itself"


def corrupt(where: str, expected: str, found: object) -> CorruptFileError:
    """Return the error to raise for a file whose content this package would not have written."""
    next_step = "The file is damaged or was not written by hf_trainweights: restore it from a copy."
    # str() would fail for a list that is a thousand levels deep.
    text = reprlib.repr(found) if isinstance(found, list | dict) else str(found)
    return CorruptFileError(where, expected, text[:200], next_step)


def flatten(tree: Any) -> tuple[dict[str, Any], list[Storage]]:
    """Take a tree apart: return `{"tree": node, "tensors": [view, ...]}`, ready for JSON, and the viewed storages.

    UnstorableError names the key path of a value that is not in this module's table, or contains itself.
    """
    flattener = _Flattener()
    node = flattener.node(tree, ())
    views, storages = find_storages(flattener.tensors, flattener.paths)
    return {"tree": node, "tensors": views}, storages


def unflatten(structure: Mapping[str, Any], storages: Sequence[Tensor]) -> Any:
    """Undo `flatten`. Tensors share the memory of `storages`, which have the right shapes and dtypes, on any device.

    CorruptFileError: a node or a view is not as `flatten` returns it.
    """
    return _value(structure.get("tree"), build_tensors(structure.get("tensors"), storages), ())


def _is_key(value: object) -> TypeGuard[Key]:
    return value is None or type(value) in _SCALARS


@dataclass
class _Flattener:
    tensors: list[Tensor | Joined] = field(default_factory=list)
    paths: list[list[KeyPath]] = field(default_factory=list)
    _indices: dict[int, int] = field(default_factory=dict)
    _open: list[int] = field(default_factory=list)

    def node(self, value: Any, path: KeyPath) -> Json:
        kind = type(value)
        if _is_key(value):
            return _scalar_node(value, path)
        if isinstance(value, Tensor | Joined):
            return {"tensor": self._tensor_index(value, path)}
        if kind is torch.dtype and str(value).removeprefix("torch.") in DTYPES:
            return {"dtype": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"device": str(value)}
        if kind is torch.Size:
            return {"size": list(value)}
        if kind is list or kind is tuple or kind in _MAPPING_KINDS:
            return self._container_node(value, path)
        if name := object_name(value):
            return {"object": [name, self.node(object_state(value), path)]}
        expected = "a scalar, list, tuple, dict, torch.dtype, torch.device, torch.Size or tensor"
        next_step = "Convert it, e.g. with float(), list() or torch.as_tensor(), or leave it out."
        raise UnstorableError(path_text(path), expected, f"{kind.__module__}.{kind.__qualname__}", next_step)

    def _container_node(self, value: Any, path: KeyPath) -> Json:
        if id(value) in self._open or len(self._open) == MAX_DEPTH:
            problem = "a container that contains itself" if id(value) in self._open else "a deeper one"
            raise UnstorableError(path_text(path), f"a tree at most {MAX_DEPTH} deep", problem, "Flatten it.")
        self._open.append(id(value))
        if type(value) in _MAPPING_KINDS:
            node: Json = self._mapping_node(value, path)
        else:
            items: list[Json] = [self.node(item, (*path, index)) for index, item in enumerate(value)]
            node = items if type(value) is list else {"tuple": items}
        self._open.pop()
        return node

    def _mapping_node(self, mapping: Mapping[Any, Any], path: KeyPath) -> dict[str, Json]:
        items: Json = []
        for key, value in mapping.items():
            if not _is_key(key):
                shown_key = f"{type(key).__qualname__} {key!r}"[:80]
                raise UnstorableError(path_text(path), "keys that are scalars", shown_key, "Use a str.")
            items.append([_scalar_node(key, path), self.node(value, (*path, key))])
        node: dict[str, Json] = {_MAPPING_KINDS[type(mapping)]: items}
        attributes = dict(getattr(mapping, "__dict__", {}))
        if "_metadata" in attributes:
            node["metadata"] = self.node(attributes.pop("_metadata"), (*path, "_metadata"))
        if attributes:
            others = f"attributes {', '.join(attributes)}"
            raise UnstorableError(path_text(path), "a dict without attributes", others, "Use a plain dict.")
        return node

    def _tensor_index(self, tensor: Tensor | Joined, path: KeyPath) -> int:
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
        expected = f"an integer of at most {_MAX_INT_BITS} bits"
        raise UnstorableError(path_text(path), expected, f"{value.bit_length()} bits", "Store it as a str.")
    return value


def _value(node: Any, tensors: Sequence[Tensor], path: KeyPath) -> Any:
    # The path becomes text only for an error. Else a long key above a long list would be copied for each item.
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
    name, state = (content[0], content[1]) if kind == "object" and type(content) is list and content[1:] else ("", None)
    value = _value(state, tensors, (*path, "attributes")) if name else None
    try:
        if name:
            return build_object(name, value)
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


def find_storages(
    tensors: Sequence[Tensor | Joined], paths: Sequence[Sequence[KeyPath]]
) -> tuple[list[Json], list[Storage]]:
    """Return a view per tensor, as JSON, and the storages that they view, found by shared memory as in torch.save.

    `tensors` are distinct objects, `paths` the key paths of each. UnstorableError names the key path of a tensor that
    is not plain and dense, or shares memory with a tensor of another dtype.
    """
    groups: dict[object, list[int]] = {}
    for index, tensor in enumerate(tensors):
        for piece in tensor.pieces.values() if isinstance(tensor, Joined) else (tensor,):
            require_storable(piece, paths[index][0])
        group = (index,) if isinstance(tensor, Joined) else tensor.untyped_storage()._cdata
        groups.setdefault(group, []).append(index)
    views: list[Json] = [None] * len(tensors)
    storages: list[Storage] = []
    for group in groups.values():
        first = tensors[group[0]]
        if isinstance(first, Joined):
            views[group[0]] = first.view(len(storages))
            for name, piece in first.pieces.items():
                storages.append(_compact([piece], [[(*path, name) for path in paths[group[0]]]]))
            continue
        alike = [tensor for i in group if isinstance(tensor := tensors[i], Tensor)]
        storage = _compact(alike, [paths[i] for i in group])
        for i, tensor in zip(group, alike, strict=True):
            views[i] = _view(tensor, len(storages), storage)
        storages.append(storage)
    return views, storages


def require_storable(tensor: Tensor, path: KeyPath) -> None:
    """Check that a tensor is plain and dense, of a dtype in `DTYPES`; UnstorableError names its key path."""
    problem = None
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        problem = f"a {type(tensor).__module__}.{type(tensor).__qualname__}"
    elif tensor.is_nested:
        problem = "a nested tensor"
    elif tensor.layout != torch.strided or tensor.is_meta:
        problem = f"layout {tensor.layout} on {tensor.device}"
    elif str(tensor.dtype).removeprefix("torch.") not in DTYPES:
        problem = f"dtype {tensor.dtype}"
    elif tensor.is_conj() or tensor.is_neg():
        problem = "a lazily conjugated or negated tensor"
    if problem:
        next_step = "Store the plain tensors behind it."
        raise UnstorableError(path_text(path), "a plain dense tensor", problem, next_step)


def _compact(tensors: Sequence[Tensor], paths: Sequence[Sequence[KeyPath]]) -> Storage:
    first = tensors[0].detach()
    for tensor, (path, *_) in zip(tensors, paths, strict=True):
        if tensor.dtype != first.dtype:
            dtypes = f"{tensor.dtype}, and {first.dtype} at {path_text(paths[0][0])}"
            raise UnstorableError(path_text(path), "one dtype for shared memory", dtypes, "Clone one of the two.")
    spans: list[tuple[int, int]] = []
    used = [tensor for tensor in tensors if tensor.numel()]
    for start, stop in sorted(_span(int(view.storage_offset()), view.shape, view.stride()) for view in used):
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(stop, spans[-1][1]))
        else:
            spans.append((start, stop))
    layouts = {(tensor.storage_offset(), tensor.shape, tensor.stride()) for tensor in tensors}
    exclusive = len(layouts) == 1 and first.is_contiguous()
    shape = tuple(first.shape) if exclusive else (sum(stop - start for start, stop in spans),)
    in_tree_order = tuple(path for tensor_paths in paths for path in tensor_paths)
    size_bytes = math.prod(shape) * first.itemsize
    return Storage(first, tuple(spans or [(0, 0)]), shape, in_tree_order, exclusive, size_bytes)


def _offset(tensor: Tensor, spans: Iterable[tuple[int, int]]) -> int:
    """Return the offset of a tensor in its storage once the gaps between the spans are closed."""
    old, position = int(tensor.storage_offset()), 0
    for start, stop in spans:
        if start <= old < stop:
            return position + old - start
        position += stop - start
    return 0  # an empty tensor


def _view(tensor: Tensor, number: int, storage: Storage) -> dict[str, Json]:
    view: dict[str, Json] = {"storage": number}
    if tuple(tensor.shape) != storage.shape:
        view["shape"] = list(tensor.shape)
    if tensor.stride() != _row_major_stride(tensor.shape):
        view["stride"] = list(tensor.stride())
    if offset := _offset(tensor, storage.spans):
        view["offset"] = offset
    if tensor.requires_grad:
        view["requires_grad"] = True
    if isinstance(tensor, torch.nn.Parameter):
        view["parameter"] = True
    return view


def build_tensors(views: object, storages: Sequence[Tensor]) -> list[Tensor]:
    """Build the tensors that `find_storages` took apart; they share the memory of `storages`.

    CorruptFileError: a view is malformed or reaches beyond its storage.
    """
    if type(views) is not list:
        raise corrupt("the table of tensors", "a list", views)
    if twice := repeated(views):
        raise corrupt("the table of tensors", "each storage in one joined tensor", twice)
    return [_tensor(f"tensor {index}", view, storages) for index, view in enumerate(views)]


def require_sizes(where: str, sizes: object) -> list[int]:
    """Check that `sizes` can be a shape or strides, at most 64 integers from 0 to 2**62 - 1, and return it."""
    if type(sizes) is not list or len(sizes) > _MAX_DIMENSIONS:
        raise corrupt(where, f"a list of at most {_MAX_DIMENSIONS} integers", sizes)
    if not all(type(size) is int and 0 <= size < _MAX_ELEMENTS for size in sizes):
        raise corrupt(where, f"integers from 0 to {_MAX_ELEMENTS - 1}", sizes)
    return sizes


def _span(offset: int, shape: Sequence[int], stride: Sequence[int]) -> tuple[int, int]:
    """Return the range of a storage's elements that a tensor spans, which is not empty."""
    return offset, offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _row_major_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor."""
    sizes = [max(size, 1) for size in shape]
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def _tensor(where: str, view: Any, storages: Sequence[Tensor]) -> Tensor:
    if type(view) is dict and "joined" in view:
        shape = require_sizes(f"{where}, shape", view.get("shape"))
        try:
            return join(view["joined"], shape, storages, requires_grad=view.get("requires_grad", False) is True)
        except ValueError as error:
            raise corrupt(where, "storages whose elements fill its shape", error) from error
    number = view.get("storage") if type(view) is dict else None
    if type(number) is not int or not 0 <= number < len(storages):
        raise corrupt(where, f"a storage below {len(storages)}", number)
    storage = storages[number]
    shape, stride, offset = _layout(where, view, storage)
    requires_grad = view.get("requires_grad", False) is True
    if requires_grad and not (storage.is_floating_point() or storage.is_complex()):
        raise corrupt(f"{where}, requires_grad", "a floating-point or complex tensor", storage.dtype)
    # torch builds tensors like this too. The result is no view in autograd's sense, so in-place writes are allowed.
    tensor = torch.empty(0, dtype=storage.dtype, device=storage.device)
    tensor.set_(storage.untyped_storage(), offset, shape, stride)
    if view.get("parameter", False) is True:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def _layout(where: str, view: Mapping[str, Any], storage: Tensor) -> tuple[list[int], list[int], int]:
    shape = require_sizes(f"{where}, shape", view.get("shape", list(storage.shape)))
    elements = math.prod(shape)
    if elements >= _MAX_ELEMENTS:
        raise corrupt(f"{where}, shape", f"fewer than {_MAX_ELEMENTS} elements", shape)
    stride = require_sizes(f"{where}, stride", view.get("stride", list(_row_major_stride(shape))))
    if len(stride) != len(shape):
        raise corrupt(f"{where}, stride", f"{len(shape)} of them", stride)
    (offset,) = require_sizes(f"{where}, offset", [view.get("offset", 0)])
    _, stop = _span(offset, shape, stride) if elements else (offset, offset)
    if stop > storage.numel():
        raise corrupt(where, f"a view within the {storage.numel()} elements of its storage", view)
    return shape, stride, offset
