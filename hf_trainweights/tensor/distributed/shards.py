"""The shards of a quantized weight that ranks hold: cut out of the unsharded weight, and gathered into it again.

A shard is a quantized weight, too. Some entries of stored tensors serve all rows or all columns, such as the one scale
of a row that is cut along K: every rank holds a copy of these.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_trainweights.formats.arithmetic import as_bytes
from hf_trainweights.formats.cutting import cut_columns, cut_rows, join_columns
from hf_trainweights.formats.group_scales import pack_bits, unpack_bits
from hf_trainweights.tensor.distributed.placements import Interval, Placed, check_parts, local_tensor, sizes_of
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def has_own_codes(placed: Placed) -> bool:
    """Return whether a rank can quantize its shard of the float weight and get the codes of the unsharded weight.

    It can if the shard shares no entry of a stored tensor with other shards. The scale of a row that is cut along K
    depends on all columns of the row, and tensors that rows share depend on all rows.
    """
    form, shape = placed.format, placed.stored_shape
    intervals = placed.own_intervals()
    rows_are_cut, columns_are_cut = (intervals[dim] != [(0, shape[dim])] for dim in (-2, -1))
    if not form.has_independent_rows and (rows_are_cut or columns_are_cut):
        return False
    return not columns_are_cut or _cut_along_columns(placed, intervals) == set(form.tensor_names)


def cut(weight: QuantizedTensor, whole: DTensor, name: str = "weight", plan: str = "its placements") -> QuantizedTensor:
    """Return this rank's shard of a weight, cut by the placements of `whole`, in contiguous copies.

    UnsupportedError: `check_parts` raises it, on all ranks, if the shard of any rank cannot be cut. It names the weight
    and the `plan`, see `Placed`.
    """
    placed = Placed(name, weight.format, weight.transposed, whole, plan)
    check_parts(placed)
    form, shape = weight.format, weight.stored_shape
    *rows, columns = placed.own_intervals()
    tensors: Mapping[str, Tensor] = weight.tensors
    for dim, runs in enumerate(rows):
        take = functools.partial(_take, dim=dim, runs=runs)
        last = dim == len(shape) - 2
        tensors = cut_rows(form, tensors, take) if last else {key: take(stored) for key, stored in tensors.items()}
    shard_shape = sizes_of([*rows, columns])
    pieces = [cut_columns(form, tensors, (*shard_shape[:-1], shape[-1]), start, stop) for start, stop in columns]
    tensors = join_columns(form, pieces, [stop - start for start, stop in columns])
    return weight.holding({key: t.clone(memory_format=torch.contiguous_format) for key, t in tensors.items()})


def gather(tensor: DTensor) -> Tensor:
    """Return the unsharded tensor of a DTensor; all ranks of its mesh must call it.

    The ranks send the stored tensors of a quantized weight to each other, never float values.
    """
    shard = local_tensor(tensor)
    if not isinstance(shard, QuantizedTensor):
        with torch.no_grad():
            return tensor.full_tensor()
    form, placed = shard.format, Placed("weight", shard.format, shard.transposed, tensor)
    sizes = form.tensor_specs(placed.stored_shape, shard.scale_dtype)
    along_columns = _cut_along_columns(placed, placed.own_intervals())
    rows, columns = tensor.dim() - 2, tensor.dim() - 1
    gathered = {}
    for key, stored in shard.tensors.items():
        is_shared = {rows: key in form.shared_names, columns: key not in along_columns}
        dims = [dim for dim in range(tensor.dim()) if not is_shared.get(dim)]
        size, bits = sizes[key][0], form.bit_packed.get(key)
        if bits is None:
            gathered[key] = _gather(placed, stored, size, dims)
        else:
            # Bits of two shards may share a byte, so each code is sent in a byte of its own.
            codes = unpack_bits(stored, bits, form.groups_in(shard.stored_shape[-1])).to(torch.uint8)
            groups = form.groups_in(placed.stored_shape[-1])
            gathered[key] = pack_bits(_gather(placed, codes, (*size[:-1], groups), dims), bits)
    return shard.holding(gathered)


def _cut_along_columns(placed: Placed, intervals: Sequence[Sequence[Interval]]) -> set[str]:
    """Return the names of the stored tensors that a cut along K divides; the others serve all columns alike."""
    form, (*lead, K) = placed.format, placed.stored_shape
    unsharded, sharded = (form.tensor_specs((*lead, size), torch.float32) for size in (K, sizes_of(intervals)[-1]))
    return {key for key in unsharded if key in form.bit_packed or unsharded[key][0][-1] != sharded[key][0][-1]}


def _gather(placed: Placed, shard: Tensor, shape: Sequence[int], dims: Collection[int]) -> Tensor:
    """Return the unsharded tensor, of `shape`, from the shards of the ranks, which may be cut along `dims` only."""
    from torch.distributed.tensor import DTensor, Replicate

    placements = [
        _moved(placement, dim) if dim in dims else Replicate()
        for placement, dim in zip(placed.whole.placements, placed.stored_dims, strict=True)
    ]
    size, stride = torch.Size(shape), torch.empty(tuple(shape), device="meta").stride()
    sent = as_bytes(shard.contiguous())
    shards = DTensor.from_local(sent, placed.whole.device_mesh, placements, run_check=False, shape=size, stride=stride)
    return shards.full_tensor().contiguous().view(shard.dtype)


def _moved(placement: Any, dim: int | None) -> Any:
    """Return a placement of the same kind along another dimension."""
    factor = getattr(placement, "split_factor", None)
    return type(placement)(dim) if factor is None else type(placement)(dim, split_factor=factor)


def _take(tensor: Tensor, dim: int, runs: Sequence[Interval]) -> Tensor:
    """Return the entries of intervals along a dimension: a view if there is one interval, else a copy."""
    pieces = [as_bytes(tensor).narrow(dim, start, end - start) for start, end in runs]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)).view(tensor.dtype)
