"""Tensors <-> storages: which tensors share memory, which part of it is in use, and how each of them views it.

A tensor is a view, `{"storage": 3, "shape": [2, 2], "stride": [1, 2], "offset": 4, "requires_grad": true,
"parameter": true}`; left out are the shape where it is the storage's, strides that are row-major, an offset
of 0 and false. Tensors that share memory share a storage, so a write through one shows in the other. A
storage holds what its views span, gaps closed: a small view of a large tensor does not drag the rest along.
Errors name a tensor by its key path, i.e. where in the tree it is.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import ALL_DTYPES, Json
from hf_trainweights.errors import CorruptFileError, UnstorableError

Key = str | int | float | bool | None
KeyPath = tuple[Key, ...]

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in ALL_DTYPES}
_MAX_DIMENSIONS = 64  # torch's own limit
_MAX_ELEMENTS = 1 << 62  # torch counts elements in int64

# Names of parameters have about 100 characters. A file may claim a key of a megabyte, above many tensors.
_SHOWN_CHARACTERS = 500


def path_text(path: KeyPath) -> str:
    """Return a key path as people write it, e.g. `state.0.exp_avg`; of a key the first 500 characters."""
    return ".".join(str(key)[:_SHOWN_CHARACTERS] for key in path) or "the value itself"


def corrupt(where: str, expected: str, found: object) -> CorruptFileError:
    """Return the error to raise for a file that this package did not write so."""
    next_step = "The file is damaged or was not written by hf_trainweights: restore it from a copy."
    # A list may be a thousand levels deep, which str() gives up at.
    text = reprlib.repr(found) if isinstance(found, list | dict) else str(found)
    return CorruptFileError(where, expected, text[:200], next_step)


@dataclass(frozen=True)
class Storage:
    """Memory that one or more tensors of a tree share.

    Args:
        source: One of these tensors.
        spans: Which elements of its storage are in use: disjoint `(start, stop)` pairs, ascending.
        shape: The shape a codec sees: the tensors' if `exclusive`, else the number of elements in use.
        paths: Key paths of its tensors, in the order of the tree.
        exclusive: Every tensor is the same contiguous view of all of it: one tensor, or tied ones.
        size_bytes: Size of the elements in use.
    """

    source: Tensor
    spans: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    paths: tuple[KeyPath, ...]
    exclusive: bool
    size_bytes: int

    def read(self) -> Tensor:
        """Return the elements in use as a contiguous CPU tensor of `shape`, a view where possible."""
        pieces = [self.source.as_strided((stop - start,), (1,), start).cpu() for start, stop in self.spans]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(self.shape)


def find_storages(tensors: Sequence[Tensor], paths: Sequence[Sequence[KeyPath]]) -> tuple[list[Json], list[Storage]]:
    """Return a view per tensor, as JSON, and the storages that they view, as torch.save finds out who shares memory.

    `tensors` are distinct objects, `paths` the key paths of each. UnstorableError names the key path of a tensor that
    is not plain and dense, or shares memory with another dtype.
    """
    groups: dict[int, list[int]] = {}
    for index, tensor in enumerate(tensors):
        require_storable(tensor, paths[index][0])
        groups.setdefault(tensor.untyped_storage()._cdata, []).append(index)
    views: list[Json] = [None] * len(tensors)
    storages = []
    for number, group in enumerate(groups.values()):
        storage = _compact([tensors[i] for i in group], [paths[i] for i in group])
        storages.append(storage)
        for i in group:
            views[i] = _view(tensors[i], number, storage)
    return views, storages


def require_storable(tensor: Tensor, path: KeyPath) -> None:
    """Check that a tensor is plain and dense, and its dtype known; UnstorableError names its key path."""
    problem = None
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        problem = f"a {type(tensor).__module__}.{type(tensor).__qualname__}"
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
            found = f"{tensor.dtype}, and {first.dtype} at {path_text(paths[0][0])}"
            raise UnstorableError(path_text(path), "one dtype for shared memory", found, "Clone one of the two.")
    spans: list[tuple[int, int]] = []
    for start, stop in sorted(_span(tensor) for tensor in tensors if tensor.numel()):
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


def _span(tensor: Tensor) -> tuple[int, int]:
    start = int(tensor.storage_offset())
    return start, start + span_elements(tensor.shape, tensor.stride())


def _offset(tensor: Tensor, spans: Iterable[tuple[int, int]]) -> int:
    """Return where a tensor starts in its storage once the gaps between the spans are closed."""
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
    if tensor.stride() != row_major_stride(tensor.shape):
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
    return [_tensor(f"tensor {index}", view, storages) for index, view in enumerate(views)]


def require_sizes(where: str, sizes: object) -> list[int]:
    """Return `sizes` if it can be a shape or strides: a list of at most 64 integers from 0 to 2**62 - 1."""
    if type(sizes) is not list or len(sizes) > _MAX_DIMENSIONS:
        raise corrupt(where, f"a list of at most {_MAX_DIMENSIONS} integers", sizes)
    if not all(type(size) is int and 0 <= size < _MAX_ELEMENTS for size in sizes):
        raise corrupt(where, f"integers from 0 to {_MAX_ELEMENTS - 1}", sizes)
    return sizes


def span_elements(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the distance from the first to the last element of a tensor, both included."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def row_major_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _tensor(where: str, view: Any, storages: Sequence[Tensor]) -> Tensor:
    number = view.get("storage") if type(view) is dict else None
    if type(number) is not int or not 0 <= number < len(storages):
        raise corrupt(where, f"a storage below {len(storages)}", number)
    storage = storages[number]
    shape, stride, offset = _layout(where, view, storage)
    requires_grad = view.get("requires_grad", False) is True
    if requires_grad and not (storage.is_floating_point() or storage.is_complex()):
        raise corrupt(f"{where}, requires_grad", "a floating-point or complex tensor", storage.dtype)
    # As torch does it: the result is no view in autograd's sense, so that in-place writes are free.
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
    stride = require_sizes(f"{where}, stride", view.get("stride", list(row_major_stride(shape))))
    if len(stride) != len(shape):
        raise corrupt(f"{where}, stride", f"{len(shape)} of them", stride)
    (offset,) = require_sizes(f"{where}, offset", [view.get("offset", 0)])
    if offset + (span_elements(shape, stride) if elements else 0) > storage.numel():
        raise corrupt(where, f"a view within the {storage.numel()} elements of its storage", view)
    return shape, stride, offset
