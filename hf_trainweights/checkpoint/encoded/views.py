"""Views -> tensors: the tensors that storages.py took apart, built again in the memory of their storages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.checkpoint.encoded.key_paths import corrupt

_MAX_DIMENSIONS = 64  # torch's own limit
_MAX_ELEMENTS = 1 << 62  # torch counts elements in int64


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
