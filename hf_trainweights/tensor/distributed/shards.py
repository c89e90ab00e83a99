"""Parts of a quantized weight that ranks hold: cut out of the whole weight, and gathered into it again.

A part is a quantized weight too. What a stored tensor holds for all rows or columns alike, such as the one scale of a
row that is cut along K, every rank holds.
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
    """Return whether a part that is cut out of the float weight is quantized to the very codes of the whole weight.

    So it is where the part shares no stored tensor with another: what is stored of it then depends on nothing else. The
    scale of a row that is cut along K depends on the whole row, and what rows share on all of them.
    """
    form, shape = placed.format, placed.stored_shape
    intervals = placed.own_intervals()
    rows_are_cut, columns_are_cut = (intervals[dim] != [(0, shape[dim])] for dim in (-2, -1))
    if not form.has_independent_rows and (rows_are_cut or columns_are_cut):
        return False
    return not columns_are_cut or _cut_along_columns(placed, intervals) == set(form.tensor_names)


def cut(weight: QuantizedTensor, whole: DTensor, name: str = "weight", plan: str = "its placements") -> QuantizedTensor:
    """Return the part of a weight that this rank is to hold, as `whole` is cut, in contiguous copies.

    UnsupportedError: as for `check_parts`, whichever rank's part it is.
    """
    placed = Placed(name, weight.format, weight.transposed, whole, plan)
    check_parts(placed)
    form, shape = weight.format, weight.stored_shape
    *rows, columns = placed.own_intervals()
    tensors: Mapping[str, Tensor] = weight.tensors
    for dim, runs in enumerate(rows):
        take = functools.partial(_take, dim=dim, runs=runs)
        last = dim == len(shape) - 2
        tensors = cut_rows(form, tensors, take) if last else {key: take(each) for key, each in tensors.items()}
    part = sizes_of([*rows, columns])
    pieces = [cut_columns(form, tensors, (*part[:-1], shape[-1]), start, stop) for start, stop in columns]
    tensors = join_columns(form, pieces, [stop - start for start, stop in columns])
    return weight.holding({key: each.clone(memory_format=torch.contiguous_format) for key, each in tensors.items()})


def gather(tensor: DTensor) -> Tensor:
    """Return the whole of a tensor that ranks hold parts of; all ranks of its mesh must call it.

    Of a quantized weight the stored tensors travel; no rank sees float values.
    """
    part = local_tensor(tensor)
    if not isinstance(part, QuantizedTensor):
        with torch.no_grad():
            return tensor.full_tensor()
    form, placed = part.format, Placed("weight", part.format, part.transposed, tensor)
    sizes = form.tensor_specs(placed.stored_shape, part.scale_dtype)
    along_columns = _cut_along_columns(placed, placed.own_intervals())
    rows, columns = tensor.dim() - 2, tensor.dim() - 1
    whole = {}
    for key, stored in part.tensors.items():
        kept = {rows: key in form.shared_names, columns: key not in along_columns}
        dims = [dim for dim in range(tensor.dim()) if not kept.get(dim)]
        size, bits = sizes[key][0], form.bit_packed.get(key)
        if bits is None:
            whole[key] = _gather(placed, stored, size, dims)
        else:
            # Bits of two parts may share a byte: codes travel in bytes of their own.
            codes = unpack_bits(stored, bits, part.stored_shape[-1] // form.column_step).to(torch.uint8)
            whole[key] = pack_bits(
                _gather(placed, codes, (*size[:-1], placed.stored_shape[-1] // form.column_step), dims), bits
            )
    return part.holding(whole)


def _cut_along_columns(placed: Placed, intervals: Sequence[Sequence[Interval]]) -> set[str]:
    """Return the stored tensors that are cut where K is; the others serve all columns alike."""
    form, (*lead, K) = placed.format, placed.stored_shape
    of_whole, of_part = (form.tensor_specs((*lead, each), torch.float32) for each in (K, sizes_of(intervals)[-1]))
    return {key for key in of_whole if key in form.bit_packed or of_whole[key][0][-1] != of_part[key][0][-1]}


def _gather(placed: Placed, part: Tensor, shape: Sequence[int], dims: Collection[int]) -> Tensor:
    """Return a whole tensor, of `shape`, from the parts of the ranks, which are cut along some of `dims`."""
    from torch.distributed.tensor import DTensor, Replicate

    placements = [
        _moved(placement, dim) if dim in dims else Replicate()
        for placement, dim in zip(placed.whole.placements, placed.stored_dims, strict=True)
    ]
    size, stride = torch.Size(shape), torch.empty(tuple(shape), device="meta").stride()
    sent = as_bytes(part.contiguous())
    parts = DTensor.from_local(sent, placed.whole.device_mesh, placements, run_check=False, shape=size, stride=stride)
    return parts.full_tensor().contiguous().view(part.dtype)


def _moved(placement: Any, dim: int | None) -> Any:
    """Return the same placement along another dimension."""
    factor = getattr(placement, "split_factor", None)
    return type(placement)(dim) if factor is None else type(placement)(dim, split_factor=factor)


def _take(tensor: Tensor, dim: int, runs: Sequence[Interval]) -> Tensor:
    """Return some entries along a dimension: a view of one run, a copy of several."""
    parts = [as_bytes(tensor).narrow(dim, start, end - start) for start, end in runs]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim)).view(tensor.dtype)
