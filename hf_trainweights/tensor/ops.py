"""Which ops keep a quantized weight quantized, and what each does with it; importing this module registers them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.tensor.products import PRODUCTS
from hf_trainweights.tensor.quantized_tensor import (
    ANY_LAYOUT,
    ASSIGNMENTS,
    HANDLERS,
    SHOWN_DTYPES,
    QuantizedTensor,
    unsupported_in_place,
)

aten = torch.ops.aten

_MASKS = (torch.bool, torch.uint8)


def _alias(func: Any, tensor: QuantizedTensor) -> Any:
    return return_and_correct_aliasing(func, (tensor,), {}, tensor.map(lambda stored: stored))


def _clone(func: Any, tensor: QuantizedTensor, memory_format: torch.memory_format | None = None) -> Any:
    del func
    if tensor.transposed and memory_format == torch.contiguous_format:
        return NotImplemented
    return tensor.map(torch.clone)


def _to_copy(func: Any, tensor: QuantizedTensor, **kwargs: Any) -> Any:
    """Move the stored tensors and change the dtype shown; scales are never cast."""
    del func
    dtype = kwargs.get("dtype") or tensor.dtype
    if dtype not in SHOWN_DTYPES:
        return NotImplemented
    device, non_blocking = kwargs.get("device"), kwargs.get("non_blocking", False)
    return tensor.map(lambda stored: stored.to(device, non_blocking=non_blocking, copy=True), dtype)


def _pin(func: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> QuantizedTensor:
    return tensor.map(lambda stored: func(stored, *args, **kwargs))


def _empty_like(func: Any, tensor: QuantizedTensor, **kwargs: Any) -> Any:
    """Keep the weight quantized, so that `module.to_empty(device)` allocates no float weight."""
    dtype = kwargs.get("dtype") or tensor.dtype
    if dtype not in SHOWN_DTYPES:
        return _like(func, tensor, **kwargs)
    return tensor.map(lambda stored: torch.empty_like(stored, device=kwargs.get("device")), dtype)


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
        and (target.format.canonical, target.stored_shape) == (source.format.canonical, source.stored_shape)
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
    source = source.in_layout(target.format)
    for name, stored in target.tensors.items():
        stored.copy_(source.tensors[name], non_blocking=non_blocking)
    return target


def _describe(tensor: Tensor) -> str:
    return repr(tensor) if isinstance(tensor, QuantizedTensor) else f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _positive(tensor: Tensor, dim: int) -> int:
    """Return the dimension counted from the front; IndexError if the tensor has no such dimension."""
    return range(tensor.dim())[dim]


def _stored_dim(tensor: QuantizedTensor, dim: int) -> int:
    """Return the dimension of the stored weight that dimension `dim` shows."""
    dim, last = _positive(tensor, dim), tensor.dim() - 1
    return last + last - 1 - dim if tensor.transposed and dim >= last - 1 else dim


def _narrow(tensor: QuantizedTensor, dim: int, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply an indexing function along one stored dimension to every stored tensor; not possible along K."""
    if _stored_dim(tensor, dim) == tensor.dim() - 1:
        return NotImplemented
    tensor = _divisible(tensor, dim)
    return _part(tensor, {name: function(stored) for name, stored in tensor.tensors.items()})


def _divisible(tensor: QuantizedTensor, dim: int) -> QuantizedTensor:
    """Return the tensor in a layout that can be cut along `dim`: between experts any, between rows the canonical."""
    return tensor.canonical() if _stored_dim(tensor, dim) == tensor.dim() - 2 else tensor


def _part(tensor: QuantizedTensor, tensors: dict[str, Tensor]) -> Tensor:
    """Return what the stored tensors of some of the rows stand for; a single row is dequantized."""
    shape = (*tensors["qdata"].shape[:-1], tensor.stored_shape[-1])
    if len(shape) < 2:
        rows = {name: stored.unsqueeze(0) for name, stored in tensors.items()}
        return tensor.format.dequantize(rows, (1, *shape), tensor.dtype)[0]
    return QuantizedTensor(tensors, tensor.format, shape, tensor.dtype, tensor.transposed)


def _select(func: Any, tensor: QuantizedTensor, dim: int, index: int) -> Any:
    if tensor.dim() > 2 and _positive(tensor, dim) >= tensor.dim() - 2:
        return NotImplemented
    return _narrow(tensor, dim, lambda stored: func(stored, _stored_dim(tensor, dim), index))


def _slice(func: Any, tensor: QuantizedTensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    size = tensor.shape[dim]
    if (start is None or start in (0, -size)) and (end is None or end >= size) and step == 1:
        return _alias(func, tensor)
    return _narrow(tensor, dim, lambda stored: func(stored, _stored_dim(tensor, dim), start, end, step))


def _split(func: Any, tensor: QuantizedTensor, sizes: Any, dim: int = 0) -> Any:
    if _stored_dim(tensor, dim) == tensor.dim() - 1:
        return NotImplemented
    tensor = _divisible(tensor, dim)
    pieces = {name: func(stored, sizes, _stored_dim(tensor, dim)) for name, stored in tensor.tensors.items()}
    return [_part(tensor, dict(zip(pieces, piece, strict=True))) for piece in zip(*pieces.values(), strict=True)]


def _unbind(func: Any, tensor: QuantizedTensor, dim: int = 0) -> Any:
    del func
    if tensor.dim() < 3 or _positive(tensor, dim) >= tensor.dim() - 2:
        return NotImplemented
    return [_select(aten.select.int, tensor, dim, index) for index in range(tensor.shape[dim])]


def _index(func: Any, tensor: QuantizedTensor, indices: Sequence[Tensor | None]) -> Any:
    # A mask of several dimensions selects single weights, and over experts only a plain list keeps `[*, N, K]`.
    index = indices[0]
    if len(indices) != 1 or index is None or (index.dim() != 1 and (tensor.dim() > 2 or index.dtype in _MASKS)):
        return NotImplemented
    # As bytes where that is what they are: PyTorch 2.8 does not index float8 on a CPU.
    return _narrow(
        tensor,
        0,
        lambda stored: (
            func(stored.view(torch.uint8), list(indices)).view(stored.dtype)
            if stored.dtype.itemsize == 1
            else func(stored, list(indices))
        ),
    )


def _embedding(func: Any, tensor: QuantizedTensor, indices: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Dequantize only the rows that are looked up."""
    del func, args, kwargs
    if not isinstance(tensor, QuantizedTensor) or tensor.transposed:
        return NotImplemented
    rows, K = tensor.format.take_rows(tensor.tensors, indices.flatten()), tensor.stored_shape[-1]
    return tensor.format.canonical.dequantize(rows, (indices.numel(), K), tensor.dtype).view(*indices.shape, K)


def _transpose(func: Any, tensor: QuantizedTensor, *dims: Any) -> Any:
    order = list(range(tensor.dim()))
    if func is aten.permute.default:
        order = [_positive(tensor, dim) for dim in dims[0]]
    else:
        first, second = (_positive(tensor, dim) for dim in dims or (0, 1))
        order[first], order[second] = second, first
    if order != [*range(tensor.dim() - 2), tensor.dim() - 1, tensor.dim() - 2]:
        return NotImplemented
    flipped = QuantizedTensor(tensor.tensors, tensor.format, tensor.stored_shape, tensor.dtype, not tensor.transposed)
    return return_and_correct_aliasing(func, (tensor, *dims), {}, flipped)


def _view(func: Any, tensor: QuantizedTensor, shape: Sequence[int], **kwargs: Any) -> Any:
    del kwargs
    same = len(shape) == tensor.dim() and all(new in (-1, old) for new, old in zip(shape, tensor.shape, strict=True))
    return _alias(func, tensor) if same else NotImplemented


_TABLE: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten._pin_memory.default: _pin,
    aten.empty_like.default: _empty_like,
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
    aten.expand.default: _view,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    **dict.fromkeys(
        (
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
}

HANDLERS.update(_TABLE | PRODUCTS)
ANY_LAYOUT.update(PRODUCTS)
_CANONICAL_ALONE = (_to_copy, _pin, _empty_like, _view)
ANY_LAYOUT.update(func for func, handler in _TABLE.items() if handler not in _CANONICAL_ALONE)


def _set_item(tensor: QuantizedTensor, *index_and_value: Any) -> None:
    del index_and_value
    raise unsupported_in_place("__setitem__", tensor)


def _set_requires_grad(tensor: QuantizedTensor, requires_grad: bool) -> None:
    if requires_grad:
        raise UnsupportedError(
            "requires_grad",
            "False on a quantized weight, which takes no gradient",
            f"True on {tensor!r}",
            "Train an adapter, for example with PEFT, or model.dequantize() first.",
        )


def _set_data(tensor: QuantizedTensor, data: Tensor) -> None:
    """Take over shape, dtype and stored tensors of `data`; PEFT casts a model by `param.data = param.data.to(...)`."""
    if not isinstance(data, QuantizedTensor):
        raise unsupported_in_place("data", tensor)
    torch._C._disabled_torch_function_impl(Tensor.data.__set__, (QuantizedTensor,), (tensor, data), {})  # type: ignore[attr-defined]
    tensor.__init__(data.tensors, data.format, data.stored_shape, data.dtype, data.transposed)


ASSIGNMENTS.update(
    {
        Tensor.__setitem__: _set_item,
        Tensor.requires_grad.__set__: _set_requires_grad,  # type: ignore[attr-defined]
        Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    }
)
