"""Handlers of the ops that `fully_shard` and DTensor need for a quantized weight; importing this registers them.

FSDP allocates each shard by `new_zeros`, copies a chunk of the weight into it, and keeps a flat view of it. Between
ranks the stored tensors of a weight are sent one by one: `DTensor.full_tensor` gathers the rows of all ranks, and
`distribute_tensor` scatters them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.formats.arithmetic import as_bytes
from hf_trainweights.tensor import ops as _ops  # noqa: F401  (its handlers, which some of these extend, come first)
from hf_trainweights.tensor.dispatch import HANDLERS, implements, replaces, unsupported_collective
from hf_trainweights.tensor.distributed.sharding import pad_rows
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor
from hf_trainweights.tensor.read_only import read_only

aten = torch.ops.aten

_new_tensor = HANDLERS[aten.new_zeros.default]
_alias = HANDLERS[aten.alias.default]
_copy_of = HANDLERS[aten.clone.default]
_to_copy = HANDLERS[aten._to_copy.default]
_view = HANDLERS[aten.view.default]
_split_rows = HANDLERS[aten.split.Tensor]
_slice_rows = HANDLERS[aten.slice.Tensor]

# Variables that accelerate sets if FSDP is to load on the first rank, which then sends the weights to the others.
_SENT_FROM_FIRST_RANK = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")


class FlatWeight(Tensor):
    """The result of `weight.view(-1)` among several ranks, which is dequantized at each use and takes no memory.

    FSDP keeps such a view of every shard and never reads it. A dequantized view would take the memory of the float
    weight.
    """

    weight: QuantizedTensor

    @classmethod
    def of(cls, weight: QuantizedTensor) -> FlatWeight:
        """Return the view of a weight."""
        flat = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, (weight.numel(),), dtype=weight.dtype, device=weight.device, storage_size=0
        )
        flat.weight = weight
        return flat

    def to_float(self) -> Tensor:
        """Return the values as a read-only tensor with memory of its own."""
        return read_only(self.weight.dequantize().reshape(-1))

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        """Return the values as an array; see `ReadOnlyTensor.numpy`."""
        return self.to_float().numpy(force=force)

    def tolist(self) -> list[float]:
        """Return the values as Python numbers."""
        return self.to_float().tolist()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        float_args, float_kwargs = tree_map_only(FlatWeight, FlatWeight.to_float, (args, kwargs or {}))
        return func(*float_args, **float_kwargs)

    __torch_dispatch__ = __torch_function__


def _among_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


@implements(aten._to_copy.default)
def _to_copy_unless_sent_as_floats(func: Any, tensor: QuantizedTensor, **kwargs: Any) -> Any:
    """Refuse a move to the meta device if accelerate is about to send all weights as floats from the first rank.

    Every rank comes here, so every rank gets the error. Later only the first rank would get it, while the others wait.
    """
    device = kwargs.get("device")
    if device is not None and device.type == "meta" and _among_ranks() and all(map(_is_on, _SENT_FROM_FIRST_RANK)):
        raise UnsupportedError(
            "FSDP's cpu_ram_efficient_loading",
            "float weights",
            f"{tensor!r}, whose codes only from_pretrained gives to every rank",
            "Set fsdp_cpu_ram_efficient_loading: false in accelerate's or the Trainer's FSDP configuration.",
        )
    return _to_copy(func, tensor, **kwargs)


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes", "on", "y", "t")


@implements(aten.new_zeros.default)
def _new_zeros(func: Any, tensor: QuantizedTensor, size: Sequence[int], **kwargs: Any) -> Any:
    """Return a quantized weight if the size is that of a shard of rows among ranks, else float zeros."""
    is_shard = tuple(size[1:]) == tuple(tensor.shape[1:]) and len(size) == tensor.dim()
    if not _among_ranks() or not is_shard or any(kwargs.values()):
        return _new_tensor(func, tensor, size, **kwargs)
    if not tensor.can_be_cut(size[0]):
        raise UnsupportedError(
            "fully_shard",
            f"parts of equal size, and of whole groups of {tensor.format.column_step} columns",
            f"{tensor!r}, whose first dimension is K, in parts of {size[0]}",
            "Take another number of ranks, pass it as ignored_params, or name its layer in modules_to_not_convert.",
        )
    return tensor.zeros(size[0])


@implements(aten.split.Tensor)
def _split(func: Any, tensor: QuantizedTensor, size: int, dim: int = 0) -> Any:
    """Cut a transposed weight by columns: these are its first dimension, along which FSDP cuts."""
    by_columns = _among_ranks() and tensor.is_cut_by_columns and dim == 0 and tensor.can_be_cut(size)
    return tensor.chunks(size) if by_columns else _split_rows(func, tensor, size, dim)


@implements(aten.slice.Tensor)
def _slice(func: Any, tensor: QuantizedTensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    """Let the first rows of a shard keep its `padded_rows`: FSDP pads a shard, and shows the rows without padding."""
    rows = _slice_rows(func, tensor, dim, start, end, step)
    if tensor.padded_rows is not None and isinstance(rows, QuantizedTensor) and dim == 0 and not start:
        rows.padded_rows = tensor.padded_rows
    return rows


@replaces(Tensor.is_contiguous)
def _is_contiguous(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Answer True for transposed weights, too: FSDP asks this to learn whether it may cut their first dimension."""
    del args, kwargs
    return True if isinstance(tensor, QuantizedTensor) and _among_ranks() else NotImplemented


@implements(aten.clone.default)
def _clone(func: Any, tensor: QuantizedTensor, memory_format: torch.memory_format | None = None) -> Any:
    """Return a copy that stays transposed, because DTensor's `contiguous` has to agree with `is_contiguous`."""
    return _copy_of(func, tensor, None if _among_ranks() else memory_format)


@implements(aten.view.default)
def _flatten(func: Any, tensor: QuantizedTensor, shape: Sequence[int]) -> Any:
    if _among_ranks() and list(shape) in ([-1], [tensor.numel()]):
        return FlatWeight.of(tensor)
    return _view(func, tensor, shape)


@implements(aten.as_strided.default)
def _cut_padding(
    func: Any, tensor: QuantizedTensor, size: Sequence[int], stride: Sequence[int], offset: Any = 0
) -> Any:
    """Cut off the rows that padding has added."""
    del func
    are_rows = tuple(size[1:]) == tuple(tensor.shape[1:]) and size[0] <= tensor.shape[0]
    strides = (tensor.stride(), torch.empty(tensor.shape, device="meta").stride())
    if not are_rows or tuple(stride) not in strides or offset:
        return NotImplemented
    return _slice_rows(aten.slice.Tensor, tensor, 0, 0, size[0])


@implements(aten.constant_pad_nd.default)
def _pad(func: Any, tensor: QuantizedTensor, pad: Sequence[int], value: Any = 0) -> Any:
    """Add rows at the end, so that a collective gets the same number from all ranks."""
    del func
    if len(pad) != 2 * tensor.dim() or any(pad[:-1]) or pad[-1] < 0 or value or tensor.is_cut_by_columns:
        return NotImplemented
    return pad_rows(tensor, pad[-1])


@implements(aten.is_pinned.default)
def _is_pinned(func: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> bool:
    return all(func(stored, *args, **kwargs) for stored in tensor.held.tensors.values())


def _gather(func: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    # Wait at once: PyTorch would wait for the wrapper, to which no collective writes, and read the codes too early.
    def gather(stored: Tensor) -> Tensor:
        gathered = func(as_bytes(stored.contiguous()), *args, **kwargs)
        return torch.ops._c10d_functional.wait_tensor.default(gathered).view(stored.dtype)

    return tensor.join({name: gather(stored) for name, stored in tensor.tensors.items()}, tensor.dtype)


def _wait(func: Any, tensor: QuantizedTensor) -> Any:
    del func
    return _alias(aten.alias.default, tensor)


def _scatter(func: Any, outputs: Sequence[Any], inputs: Sequence[Sequence[Any]], *args: Any) -> Any:
    """Let the first rank send the other ranks their rows, as `distribute_tensor` does to load a full state dict."""
    weights = [*outputs, *(weight for row in inputs for weight in row)]
    if not all(isinstance(weight, QuantizedTensor) for weight in weights):
        raise unsupported_collective(func)
    works = []
    for name in outputs[0].format.tensor_names:
        received = [as_bytes(output.tensors[name]) for output in outputs]
        sent = [[as_bytes(weight.tensors[name].contiguous()) for weight in row] for row in inputs]
        _, work = func(received, sent, *args)
        works.append(work)
    for work in works:
        dist.Work.unbox(work).wait()
    return outputs, works[-1]


def _register_collectives() -> None:
    import torch.distributed.tensor  # defines them

    functional = torch.ops._c10d_functional
    implements(functional.all_gather_into_tensor.default)(_gather)
    implements(torch.ops.c10d.scatter_.default)(_scatter)
    for name in ("wait_tensor", "_wrap_tensor_autograd"):
        if hasattr(functional, name):  # PyTorch 2.8 has no `_wrap_tensor_autograd`
            implements(getattr(functional, name).default)(_wait)


if dist.is_available():
    _register_collectives()
