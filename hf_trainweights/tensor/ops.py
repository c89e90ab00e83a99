"""Handlers of the ops that keep a quantized weight quantized or refuse it, and replacements of tensor attributes.

Importing this module registers them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.formats.arithmetic import as_bytes
from hf_trainweights.formats.cutting import cut_rows
from hf_trainweights.tensor.dispatch import OF_AVERAGES, compute_dequantized, implements, replaces, unsupported_in_place
from hf_trainweights.tensor.quantized_tensor import SHOWN_DTYPES, QuantizedTensor
from hf_trainweights.tensor.read_only import HOW_TO_CHANGE, lost_write, read_only, read_only_storage

aten = torch.ops.aten

_MASKS = (torch.bool, torch.uint8)


@implements(aten.detach.default, aten.alias.default)
def _alias(func: Any, tensor: QuantizedTensor) -> Any:
    return return_and_correct_aliasing(func, (tensor,), {}, tensor.map(lambda stored: stored))


@implements(aten.clone.default)
def _clone(func: Any, tensor: QuantizedTensor, memory_format: torch.memory_format | None = None) -> Any:
    del func
    if tensor.transposed and memory_format == torch.contiguous_format:
        return NotImplemented
    return tensor.map(torch.clone)


@implements(aten._to_copy.default)
def _to_copy(func: Any, tensor: QuantizedTensor, **kwargs: Any) -> Any:
    """Move the stored tensors, and change the dtype that the weight shows; scales are never cast."""
    del func
    dtype = kwargs.get("dtype") or tensor.dtype
    if dtype not in SHOWN_DTYPES:
        return NotImplemented
    device, non_blocking = kwargs.get("device"), kwargs.get("non_blocking", False)
    return tensor.map(lambda stored: stored.to(device, non_blocking=non_blocking, copy=True), dtype)


@implements(aten._pin_memory.default)
def _pin(func: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> QuantizedTensor:
    return tensor.map(lambda stored: func(stored, *args, **kwargs))


@implements(aten.record_stream.default)
def _record_stream(func: Any, tensor: QuantizedTensor, stream: torch.Stream) -> None:
    """Keep the memory until a stream has finished with it; diffusers asks for this when it offloads layers."""
    for stored in tensor.tensors.values():
        func(stored, stream)


@implements(aten.empty_like.default)
def _empty_like(func: Any, tensor: QuantizedTensor, **kwargs: Any) -> Any:
    """Keep the weight quantized, so that `module.to_empty(device)` allocates no float weight."""
    dtype = kwargs.get("dtype") or tensor.dtype
    if dtype not in SHOWN_DTYPES:
        return _like(func, tensor, **kwargs)
    return tensor.map(lambda stored: torch.empty_like(stored, device=kwargs.get("device")), dtype)


@implements(
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
)
def _like(func: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    """Run a factory such as zeros_like, which reads no values, on a meta tensor of the weight's shape."""
    kwargs["device"] = kwargs.get("device") or tensor.device
    return func(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"), *args, **kwargs)


_OF_COPIES_INTO_WEIGHTS = (
    "Call load_state_dict(..., assign=True), or quantize the source in this format first, as PEFT's "
    f"set_base_model_state_dict needs it. Resize embeddings before they are quantized. {OF_AVERAGES} For "
    "DistributedDataParallel give all processes the same quantized weights first: load one checkpoint, or set one seed "
    "before the module is made."
)
_OF_COPIES_OF_WEIGHTS = (
    "Copy source.dequantize(), or call load_state_dict(..., assign=True). fully_shard cuts quantized weights along "
    "their first dimension alone: for them let shard_placement_fn return None."
)


@implements(aten.copy_.default)
def _copy(func: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    """Copy between equal formats only: any other copy would round, or inflate, without a word.

    Float values that equal the weight are accepted and change nothing: DistributedDataParallel copies such values into
    the weights of every process.
    """
    del func
    if isinstance(target, QuantizedTensor) and _holds(target, source):
        return target
    if not _are_alike(target, source):
        expected = "two quantized tensors of one format, shape and scale dtype"
        actual = f"{_describe(source)} to be copied into {_describe(target)}"
        next_step = _OF_COPIES_INTO_WEIGHTS if isinstance(target, QuantizedTensor) else _OF_COPIES_OF_WEIGHTS
        raise UnsupportedError("copy_", expected, actual, next_step)
    assert isinstance(target, QuantizedTensor)
    assert isinstance(source, QuantizedTensor)
    for name, tensor in target.tensors.items():
        tensor.copy_(source.tensors[name], non_blocking=non_blocking)
    return target


def _are_alike(target: Tensor, source: Tensor) -> bool:
    """Return whether two tensors are quantized in the same way, so that one can take over the codes of the other."""
    return (
        isinstance(target, QuantizedTensor)
        and isinstance(source, QuantizedTensor)
        and (target.format, target.stored_shape) == (source.format, source.stored_shape)
        and target.transposed == source.transposed
        and target.scale_dtype == source.scale_dtype
    )


@implements(aten.lerp_.Scalar)
def _lerp(func: Any, target: Tensor, source: Tensor, weight: float) -> Any:
    """Accept a step of a quantized weight towards itself: averages over training steps make it with all weights."""
    del weight
    if not isinstance(target, QuantizedTensor):
        return NotImplemented
    if not _are_equal(target, source):
        raise unsupported_in_place(str(func), target)
    return target


@implements(aten._foreach_lerp_.Scalar)
def _lerp_each(func: Any, targets: Sequence[Tensor], sources: Sequence[Tensor], weight: float) -> None:
    """Move float tensors as PyTorch does, and quantized ones as `_lerp` does; all are checked first."""
    for target, source in zip(targets, sources, strict=True):
        if isinstance(target, QuantizedTensor) and not _are_equal(target, source):
            raise unsupported_in_place(str(func), target)
    pairs = [pair for pair in zip(targets, sources, strict=True) if not isinstance(pair[0], QuantizedTensor)]
    if pairs:
        compute_dequantized(func, *map(list, zip(*pairs, strict=True)), weight)


def _are_equal(target: QuantizedTensor, source: Tensor) -> bool:
    """Return whether a tensor has exactly the values of a quantized one."""
    if not isinstance(source, QuantizedTensor):
        return _holds(target, source)
    pairs = ((as_bytes(stored), as_bytes(source.tensors[name])) for name, stored in target.tensors.items())
    return target is source or (_are_alike(target, source) and all(torch.equal(*pair) for pair in pairs))


def _holds(target: QuantizedTensor, source: Tensor) -> bool:
    """Return whether a float tensor has exactly the values of a quantized one."""
    comparable = type(source) in (Tensor, nn.Parameter) and not source.is_meta and not target.is_traced
    alike = comparable and (source.shape, source.dtype, source.device) == (target.shape, target.dtype, target.device)
    return alike and torch.equal(target.dequantize(), source)


def _describe(tensor: Tensor) -> str:
    return repr(tensor) if isinstance(tensor, QuantizedTensor) else f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _positive(tensor: Tensor, dim: int) -> int:
    """Return the dimension counted from the front; IndexError if the tensor has no such dimension."""
    return range(tensor.dim())[dim]


def _stored_dim(tensor: QuantizedTensor, dim: int) -> int:
    """Return the dimension of the stored weight that appears as dimension `dim` of the tensor."""
    dim, last = _positive(tensor, dim), tensor.dim() - 1
    return last + last - 1 - dim if tensor.transposed and dim >= last - 1 else dim


def _narrow(tensor: QuantizedTensor, dim: int, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply an indexing function along one dimension to every stored tensor; NotImplemented along K."""
    along = _stored_dim(tensor, dim)
    if along == tensor.dim() - 1:
        return NotImplemented
    shared = tensor.shared_along(along)
    tensors = {name: stored if name in shared else function(stored) for name, stored in tensor.tensors.items()}
    return _rows_of(tensor, tensors)


def _rows_of(tensor: QuantizedTensor, tensors: dict[str, Tensor]) -> Tensor:
    """Return the weight with the stored tensors of some of the rows; a single row is dequantized and read-only."""
    shape = (*tensors["qdata"].shape[:-1], tensor.stored_shape[-1])
    if len(shape) < 2:
        rows = {name: stored if stored.dim() > 1 else stored.unsqueeze(0) for name, stored in tensors.items()}
        return read_only(tensor.format.dequantize(rows, (1, *shape), tensor.dtype)[0])
    # Indices of two dimensions give several matrices of rows, and each needs the tensors that all rows share.
    expanded = {
        name: stored.expand(*shape[:-2], *stored.shape[-2:]) if name in tensor.format.shared_names else stored
        for name, stored in tensors.items()
    }
    return tensor.holding(expanded)


@implements(aten.select.int)
def _select(func: Any, tensor: QuantizedTensor, dim: int, index: int) -> Any:
    if tensor.dim() > 2 and _positive(tensor, dim) >= tensor.dim() - 2:
        return NotImplemented
    return _narrow(tensor, dim, lambda stored: func(stored, _stored_dim(tensor, dim), index))


@implements(aten.slice.Tensor)
def _slice(func: Any, tensor: QuantizedTensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    size = tensor.shape[dim]
    if (start is None or start in (0, -size)) and (end is None or end >= size) and step == 1:
        return _alias(func, tensor)
    return _narrow(tensor, dim, lambda stored: func(stored, _stored_dim(tensor, dim), start, end, step))


@implements(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func: Any, tensor: QuantizedTensor, sizes: Any, dim: int = 0) -> Any:
    along = _stored_dim(tensor, dim)
    if along == tensor.dim() - 1:
        return NotImplemented
    tensors, shared = tensor.tensors, tensor.shared_along(along)
    pieces = {name: func(stored, sizes, along) for name, stored in tensors.items() if name not in shared}
    pieces |= {name: [tensors[name]] * len(pieces["qdata"]) for name in shared}
    return [_rows_of(tensor, dict(zip(pieces, row, strict=True))) for row in zip(*pieces.values(), strict=True)]


@implements(aten.unbind.int)
def _unbind(func: Any, tensor: QuantizedTensor, dim: int = 0) -> Any:
    del func
    if tensor.dim() < 3 or _positive(tensor, dim) >= tensor.dim() - 2:
        return NotImplemented
    return [_select(aten.select.int, tensor, dim, index) for index in range(tensor.shape[dim])]


@implements(aten.index.Tensor)
def _index(func: Any, tensor: QuantizedTensor, indices: Sequence[Tensor | None]) -> Any:
    # A mask of several dimensions selects single elements. For stacked experts only a plain list keeps `[*, N, K]`.
    index = indices[0]
    if len(indices) != 1 or index is None or (index.dim() != 1 and (tensor.dim() > 2 or index.dtype in _MASKS)):
        return NotImplemented
    return _narrow(tensor, 0, lambda stored: func(as_bytes(stored), list(indices)).view(stored.dtype))


@implements(aten.embedding.default)
def _embedding(func: Any, tensor: QuantizedTensor, indices: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Dequantize the rows that are looked up, and no others."""
    del func, args, kwargs
    if not isinstance(tensor, QuantizedTensor) or tensor.transposed:
        return NotImplemented

    # Indexing would count a negative number from the end, as F.embedding does not. index_select refuses it.
    def take(stored: Tensor) -> Tensor:
        return as_bytes(stored).index_select(0, indices.flatten()).view(stored.dtype)

    rows = cut_rows(tensor.format, tensor.tensors, take)
    K = tensor.stored_shape[-1]
    return tensor.format.dequantize(rows, (indices.numel(), K), tensor.dtype).view(*indices.shape, K)


@implements(aten.t.default, aten.transpose.int, aten.permute.default)
def _transpose(func: Any, tensor: QuantizedTensor, *dims: Any) -> Any:
    order = list(range(tensor.dim()))
    if func is aten.permute.default:
        order = [_positive(tensor, dim) for dim in dims[0]]
    else:
        first, second = (_positive(tensor, dim) for dim in dims or (0, 1))
        order[first], order[second] = second, first
    if order != [*range(tensor.dim() - 2), tensor.dim() - 1, tensor.dim() - 2]:
        return NotImplemented
    shape, transposed = tensor.stored_shape, not tensor.transposed
    flipped = QuantizedTensor.from_held(tensor.held, tensor.format, shape, tensor.dtype, transposed)
    return return_and_correct_aliasing(func, (tensor, *dims), {}, flipped)


@implements(aten.expand.default, aten.view.default, aten._unsafe_view.default)
def _view(func: Any, tensor: QuantizedTensor, shape: Sequence[int], **kwargs: Any) -> Any:
    del kwargs
    same = len(shape) == tensor.dim() and all(new in (-1, old) for new, old in zip(shape, tensor.shape, strict=True))
    return _alias(func, tensor) if same else NotImplemented


def _refuse_in_place(where: str, tensor: Tensor, *_: Any) -> Any:
    """Refuse a function that would write to a quantized weight's own memory: it has none, so the write would crash."""
    if not isinstance(tensor, QuantizedTensor):
        return NotImplemented
    raise unsupported_in_place(where, tensor)


replaces(Tensor.__setitem__)(functools.partial(_refuse_in_place, "__setitem__"))
replaces(Tensor.apply_, Tensor.map_, Tensor.map2_)(functools.partial(_refuse_in_place, "apply_, map_ or map2_"))


@replaces(Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
def _set_requires_grad(tensor: QuantizedTensor, requires_grad: bool) -> None:
    if requires_grad:
        raise UnsupportedError(
            "requires_grad",
            "False on a quantized weight, which takes no gradient",
            f"True on {tensor!r}",
            "Train an adapter, for example with PEFT, or model.dequantize() first.",
        )


@replaces(Tensor.data.__set__)  # type: ignore[attr-defined]
def set_data(tensor: Tensor, data: Tensor) -> Any:
    """Take over shape, dtype and stored tensors of `data`: PEFT casts a model by `param.data = param.data.to(...)`."""
    if not isinstance(tensor, QuantizedTensor):
        return NotImplemented
    if not isinstance(data, QuantizedTensor):
        raise UnsupportedError(
            "data",
            "an op that leaves the quantized weight as it is",
            f"{data.dtype} values in place of {tensor!r}",
            f"{HOW_TO_CHANGE} FullyShardedDataParallel puts views of one float tensor there: use fully_shard, which is "
            "fsdp_version 2 of accelerate.",
        )
    Tensor.data.__set__(tensor, data)  # type: ignore[attr-defined]
    # Take over format, shape, dtype and orientation, then the stored tensors.
    return tensor.describe_(*data.flattened[1]).hold_(data.held)


@replaces(Tensor.numpy, Tensor.__array__)
def _numpy(tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    """Refuse, because accelerate's disk_offload would store float arrays and load float weights from them."""
    del args, kwargs
    next_step = "Call dequantize() first. In place of accelerate's disk_offload give from_pretrained a device_map."
    raise UnsupportedError("numpy", "a plain tensor", f"{tensor!r}, whose values are no array in memory", next_step)


@replaces(Tensor.untyped_storage)
def _untyped_storage(tensor: QuantizedTensor) -> Any:
    # A compiler resizes the storage of the weight that it traces with.
    return NotImplemented if tensor.is_traced else read_only_storage(Tensor.untyped_storage(tensor))


@replaces(Tensor.storage)
def _storage(tensor: QuantizedTensor) -> torch.TypedStorage:
    del tensor
    raise lost_write("storage")
