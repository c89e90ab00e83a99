"""Which ops keep a quantized weight quantized, and what each does with it; importing this module registers them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.formats.base import FLOAT_DTYPES
from hf_trainweights.quantized_tensor import HANDLERS, QuantizedTensor, compute_dequantized

aten = torch.ops.aten


def _alias(func: Any, tensor: QuantizedTensor) -> Any:
    return return_and_correct_aliasing(func, (tensor,), {}, tensor.map(lambda stored: stored))


def _clone(func: Any, tensor: QuantizedTensor, **kwargs: Any) -> QuantizedTensor:
    del func, kwargs
    return tensor.map(torch.clone)


def _to_copy(func: Any, tensor: QuantizedTensor, **kwargs: Any) -> Any:
    """Move the stored tensors and change the dtype shown; scales are never cast."""
    del func
    dtype = kwargs.get("dtype") or tensor.dtype
    if dtype not in FLOAT_DTYPES:
        return NotImplemented
    device, non_blocking = kwargs.get("device"), kwargs.get("non_blocking", False)
    return tensor.map(lambda stored: stored.to(device, non_blocking=non_blocking, copy=True), dtype)


def _pin(func: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> QuantizedTensor:
    return tensor.map(lambda stored: func(stored, *args, **kwargs))


def _like(func: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    """Run a factory such as zeros_like, which reads no values, on a tensor without any."""
    kwargs["device"] = kwargs.get("device") or tensor.device
    return func(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"), *args, **kwargs)


def _copy(func: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    """Copy between equal layouts only: anything else would round, or inflate, without a word."""
    del func
    same = (
        isinstance(target, QuantizedTensor)
        and isinstance(source, QuantizedTensor)
        and (target.format, target.stored_shape) == (source.format, source.stored_shape)
        and target.transposed == source.transposed
        and target.scale.dtype == source.scale.dtype
    )
    if not same:
        raise UnsupportedError(
            "copy_",
            "two quantized tensors of one format, shape and scale dtype",
            f"{_describe(source)} to be copied into {_describe(target)}",
            "Call load_state_dict(..., assign=True), or copy source.dequantize() into a float tensor.",
        )
    assert isinstance(target, QuantizedTensor)
    assert isinstance(source, QuantizedTensor)
    for name, stored in target.tensors.items():
        stored.copy_(source.tensors[name], non_blocking=non_blocking)
    return target


def _describe(tensor: Tensor) -> str:
    return repr(tensor) if isinstance(tensor, QuantizedTensor) else f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _stored_dim(tensor: QuantizedTensor, dim: int) -> int:
    """Return the dimension of the stored weight that dimension `dim` shows."""
    dim %= tensor.dim()
    last = tensor.dim() - 1
    return last + last - 1 - dim if tensor.transposed and dim >= last - 1 else dim


def _narrow(tensor: QuantizedTensor, dim: int, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply an indexing function along one stored dimension to every stored tensor; not possible along K."""
    if _stored_dim(tensor, dim) == tensor.dim() - 1:
        return NotImplemented
    tensors = {name: function(stored) for name, stored in tensor.tensors.items()}
    shape = (*tensors["qdata"].shape[:-1], tensor.stored_shape[-1])
    if len(shape) < 2:
        rows = {name: stored.unsqueeze(0) for name, stored in tensors.items()}
        return tensor.format.dequantize(rows, (1, *shape), tensor.dtype)[0]
    return QuantizedTensor(tensors, tensor.format, shape, tensor.dtype, tensor.transposed)


def _select(func: Any, tensor: QuantizedTensor, dim: int, index: int) -> Any:
    if tensor.dim() > 2 and dim % tensor.dim() >= tensor.dim() - 2:
        return NotImplemented
    return _narrow(tensor, dim, lambda stored: func(stored, _stored_dim(tensor, dim), index))


def _slice(func: Any, tensor: QuantizedTensor, dim: int = 0, *args: Any, **kwargs: Any) -> Any:
    return _narrow(tensor, dim, lambda stored: func(stored, _stored_dim(tensor, dim), *args, **kwargs))


def _split(func: Any, tensor: QuantizedTensor, sizes: Any, dim: int = 0) -> Any:
    if _stored_dim(tensor, dim) == tensor.dim() - 1:
        return NotImplemented
    length = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    ends = [0, *itertools.accumulate(sizes)]
    return [_slice(aten.slice.Tensor, tensor, dim, start, end) for start, end in itertools.pairwise(ends)]


def _unbind(func: Any, tensor: QuantizedTensor, dim: int = 0) -> Any:
    del func
    if tensor.dim() < 3 or dim % tensor.dim() >= tensor.dim() - 2:
        return NotImplemented
    return [_select(aten.select.int, tensor, dim, index) for index in range(tensor.shape[dim])]


def _index(func: Any, tensor: QuantizedTensor, indices: Sequence[Tensor | None]) -> Any:
    if len(indices) != 1 or indices[0] is None or (tensor.dim() > 2 and indices[0].dim() != 1):
        return NotImplemented
    return _narrow(tensor, 0, lambda stored: func(stored, list(indices)))


def _embedding(func: Any, tensor: QuantizedTensor, indices: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Dequantize only the rows that are looked up."""
    del func, args, kwargs
    if not isinstance(tensor, QuantizedTensor) or tensor.transposed:
        return NotImplemented
    rows = {name: stored[indices.flatten()] for name, stored in tensor.tensors.items()}
    K = tensor.stored_shape[-1]
    return tensor.format.dequantize(rows, (indices.numel(), K), tensor.dtype).view(*indices.shape, K)


def _transpose(func: Any, tensor: QuantizedTensor, *dims: Any) -> Any:
    order = list(range(tensor.dim()))
    if func is aten.permute.default:
        order = [dim % tensor.dim() for dim in dims[0]]
    else:
        first, second = (dim % tensor.dim() for dim in dims or (0, 1))
        order[first], order[second] = second, first
    if order != [*range(tensor.dim() - 2), tensor.dim() - 1, tensor.dim() - 2]:
        return NotImplemented
    flipped = QuantizedTensor(tensor.tensors, tensor.format, tensor.stored_shape, tensor.dtype, not tensor.transposed)
    return return_and_correct_aliasing(func, (tensor, *dims), {}, flipped)


def _view(func: Any, tensor: QuantizedTensor, shape: Sequence[int]) -> Any:
    return _alias(func, tensor) if tuple(shape) == tuple(tensor.shape) else NotImplemented


_TABLE: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten._pin_memory.default: _pin,
    aten.copy_.default: _copy,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
    aten.index.Tensor: _index,
    aten.embedding.default: _embedding,
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten.permute.default: _transpose,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    **dict.fromkeys(
        (
            aten.empty_like.default,
            aten.zeros_like.default,
            aten.ones_like.default,
            aten.full_like.default,
            aten.rand_like.default,
            aten.randn_like.default,
            aten.new_empty.default,
            aten.new_zeros.default,
            aten.new_ones.default,
            aten.new_full.default,
        ),
        _like,
    ),
    **dict.fromkeys(
        (
            aten.linear.default,
            aten.matmul.default,
            aten.mm.default,
            aten.addmm.default,
            aten.bmm.default,
            aten.baddbmm.default,
            aten._grouped_mm.default,
        ),
        compute_dequantized,
    ),
}

HANDLERS.update(_TABLE)
