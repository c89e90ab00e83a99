"""The parts of a quantized weight that ranks hold: cut out of the whole weight, and gathered into it again.

A part is a quantized weight too, of the rows and columns that a DTensor's placements give to a rank. How each stored
tensor is cut follows from its shapes for the whole weight and for the part: where these agree, as of one scale for a
row that is cut along K, every rank holds all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.formats.base import Format
from hf_trainweights.tensor.held_tensor import Held
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Half-open, in elements of one dimension of the stored weight.
_Interval = tuple[int, int]


class Placed(NamedTuple):
    """A weight and how it is cut.

    Args:
        name: Full name of the weight.
        format: Its format.
        transposed: As for `QuantizedTensor`.
        whole: The parameter that it is to be or is, which says shape, mesh and placements.
        plan: What cuts it, for errors: the style of a tensor-parallel plan.
    """

    name: str
    format: Format
    transposed: bool
    whole: DTensor
    plan: str = "its placements"

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the whole stored weight, `[*, N, K]`."""
        *lead, N, K = self.whole.shape
        return (*lead, K, N) if self.transposed else (*lead, N, K)

    @property
    def stored_dims(self) -> list[int | None]:
        """For each dimension of the mesh the stored dimension that is cut along it; None where all hold the same."""
        last, dims = self.whole.dim() - 1, [getattr(placement, "dim", None) for placement in self.whole.placements]
        dims = [None if dim is None else dim % (last + 1) for dim in dims]
        return [2 * last - 1 - dim if self.transposed and dim is not None and dim >= last - 1 else dim for dim in dims]


class _Cut(NamedTuple):
    """How a stored tensor is cut along one of its dimensions.

    Args:
        dim: The dimension.
        unit: Elements of the weight, along this dimension, that one entry of the stored tensor stands for.
    """

    dim: int
    unit: int


def is_distributed(tensor: object) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor, of which this rank may hold a part.

    Args:
        tensor: Any object. A build of PyTorch without its distributed package has no such tensors.
    """
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_tensor(tensor: Any) -> Any:
    """Return what this rank holds of a tensor: the local part of a DTensor, any other tensor itself.

    Args:
        tensor: Any object.
    """
    if not is_distributed(tensor):
        return tensor
    # With gradients it would be an alias that is recorded.
    with torch.no_grad():
        return tensor.to_local()


def with_local(tensor: DTensor, local: Tensor) -> DTensor:
    """Return a DTensor as another one is, with another local part.

    Args:
        tensor: Says shape, mesh and placements.
        local: What this rank holds; kept, not copied.
    """
    from torch.distributed.tensor import DTensor

    mesh, shape, stride = tensor.device_mesh, tensor.shape, tensor.stride()
    return DTensor.from_local(local, mesh, tensor.placements, run_check=False, shape=shape, stride=stride)


def check_parts(placed: Placed) -> None:
    """Check that a weight can be cut for all ranks; each of them finds the same.

    Args:
        placed: The weight.

    Raises:
        UnsupportedError: A part would be empty, or a border between parts goes through a group or a packed word.
    """
    for coordinate in itertools.product(*(range(size) for size in placed.whole.device_mesh.shape)):
        _cuts(placed, _intervals(placed, coordinate))


def has_own_codes(placed: Placed) -> bool:
    """Return whether a part that is cut out of the float weight is quantized to the very codes of the whole weight.

    So it is where the parts share no stored tensor: what is stored of a part then depends on nothing but the part. The
    scale of a row that is cut along K is shared, because it depends on the whole row.

    Args:
        placed: The weight; its parts have passed `check_parts`.
    """
    intervals = _intervals(placed, _coordinate(placed.whole))
    dims = {dim for dim, size in enumerate(placed.stored_shape) if intervals[dim] != [(0, size)]}
    return all(dims == {cut.dim for cut in cuts} for cuts in _cuts(placed, intervals).values())


def cut(weight: QuantizedTensor, whole: DTensor, name: str = "weight", plan: str = "its placements") -> QuantizedTensor:
    """Return the part of a weight that this rank is to hold.

    Args:
        weight: The whole weight.
        whole: The parameter that it is to be, of the same shape, which says mesh and placements.
        name: Full name of the weight.
        plan: As for `Placed`.

    Returns:
        A new weight whose stored tensors are contiguous copies.

    Raises:
        UnsupportedError: As for `check_parts`, whichever rank's part it is.
    """
    placed = Placed(name, weight.format, weight.transposed, whole, plan)
    check_parts(placed)
    intervals = _intervals(placed, _coordinate(whole))
    tensors = weight.tensors
    for key, cuts in _cuts(placed, intervals).items():
        for dim, unit in cuts:
            runs = [(start // unit, end // unit) for start, end in intervals[dim]]
            tensors = {**tensors, key: _take(tensors[key], dim, runs)}
    held = Held({key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()})
    return QuantizedTensor.from_held(held, weight.format, _sizes(intervals), weight.dtype, weight.transposed)


def gather(tensor: DTensor) -> Tensor:
    """Return the whole of a tensor that ranks hold parts of; all ranks of its mesh must call it.

    Args:
        tensor: A float or quantized one. Of a quantized one the stored tensors travel; no rank sees float values.

    Returns:
        A plain tensor, or a quantized weight with its stored tensors as they lie in files.

    Raises:
        UnsupportedError: The parts are not those that `cut` makes.
    """
    part = local_tensor(tensor)
    if not isinstance(part, QuantizedTensor):
        with torch.no_grad():
            return tensor.full_tensor()
    placed = Placed("weight", part.format, part.transposed, tensor)
    cuts = _cuts(placed, _intervals(placed, _coordinate(tensor)))
    specs = part.format.tensor_specs(placed.stored_shape, part.scale_dtype)
    tensors = {key: _gather(placed, stored, specs[key][0], cuts[key]) for key, stored in part.tensors.items()}
    return QuantizedTensor.from_held(Held(tensors), part.format, placed.stored_shape, part.dtype, part.transposed)


def _gather(placed: Placed, part: Tensor, shape: Sequence[int], cuts: Sequence[_Cut]) -> Tensor:
    """Return a whole stored tensor, of `shape`, from the parts of the ranks."""
    from torch.distributed.tensor import DTensor, Replicate

    cut_dims = {cut.dim for cut in cuts}
    placements = [
        _moved(placement, dim) if dim in cut_dims else Replicate()
        for placement, dim in zip(placed.whole.placements, placed.stored_dims, strict=True)
    ]
    size, stride = torch.Size(shape), torch.empty(tuple(shape), device="meta").stride()
    # As bytes where that is what they are: not every backend sends float8.
    sent = part.contiguous().view(torch.uint8) if part.dtype.itemsize == 1 else part.contiguous()
    parts = DTensor.from_local(sent, placed.whole.device_mesh, placements, run_check=False, shape=size, stride=stride)
    return parts.full_tensor().contiguous().view(part.dtype)


def _moved(placement: Any, dim: int | None) -> Any:
    """Return the same placement along another dimension."""
    factor = getattr(placement, "split_factor", None)
    return type(placement)(dim) if factor is None else type(placement)(dim, split_factor=factor)


def _coordinate(whole: DTensor) -> tuple[int, ...]:
    """Return this rank's place in the mesh; any place for a rank that is not in it and holds nothing."""
    return tuple(whole.device_mesh.get_coordinate() or [0] * whole.device_mesh.ndim)


def _intervals(placed: Placed, coordinate: Sequence[int]) -> list[list[_Interval]]:
    """Return what one rank holds of each dimension of the stored weight."""
    own = [torch.arange(size) for size in placed.stored_shape]
    mesh_shape = placed.whole.device_mesh.shape
    for placement, dim, rank, ranks in zip(
        placed.whole.placements, placed.stored_dims, coordinate, mesh_shape, strict=True
    ):
        if dim is not None:
            # A packed weight, such as gate and up, is cut within each of its parts.
            packed = own[dim].chunk(getattr(placement, "split_factor", 1))
            own[dim] = torch.cat([_chunk(each, ranks, rank) for each in packed])
    return [_runs(indices) for indices in own]


def _chunk(indices: Tensor, ranks: int, rank: int) -> Tensor:
    chunks = indices.chunk(ranks)
    return chunks[rank] if rank < len(chunks) else indices[:0]


def _runs(indices: Tensor) -> list[_Interval]:
    """Return increasing indices as intervals."""
    if not len(indices):
        return []
    last = (indices.diff() != 1).nonzero().flatten()
    starts, ends = [0, *(last + 1).tolist()], [*last.tolist(), len(indices) - 1]
    return [(int(indices[start]), int(indices[end]) + 1) for start, end in zip(starts, ends, strict=True)]


def _sizes(intervals: Sequence[Sequence[_Interval]]) -> tuple[int, ...]:
    return tuple(sum(end - start for start, end in runs) for runs in intervals)


def _cuts(placed: Placed, intervals: Sequence[Sequence[_Interval]]) -> dict[str, list[_Cut]]:
    """Return how each stored tensor is cut; UnsupportedError where one cannot be."""
    form, shape, part = placed.format, placed.stored_shape, _sizes(intervals)
    if 0 in part or form.fallback((*shape[:-1], part[-1])) != form:
        raise _uncuttable(placed, part)
    whole_specs, part_specs = (form.tensor_specs(each, torch.float32) for each in (shape, part))
    cuts: dict[str, list[_Cut]] = {}
    for key, (whole_size, _) in whole_specs.items():
        part_size = part_specs[key][0]
        dims = [
            dim
            for dim, (of_whole, of_part) in enumerate(zip(whole_size, part_size, strict=True))
            if of_whole != of_part
        ]
        cuts[key] = [_Cut(dim, shape[dim] // whole_size[dim]) for dim in dims]
        for dim, unit in cuts[key]:
            borders = [border for run in intervals[dim] for border in run]
            fits = unit * whole_size[dim] == shape[dim] and unit * part_size[dim] == part[dim]
            if not fits or any(border % unit for border in borders):
                raise _uncuttable(placed, part)
    return cuts


def _uncuttable(placed: Placed, part: Sequence[int]) -> UnsupportedError:
    ranks = " x ".join(map(str, placed.whole.device_mesh.shape))
    sizes = f"{tuple(part)} of [*, N, K] = {placed.stored_shape}"
    return UnsupportedError(
        placed.name,
        f"a weight in {placed.format} that {placed.plan} can cut for {ranks} ranks between its groups and words",
        f"a part of {sizes}",
        "Choose a smaller group_size, another format for this weight with overrides, fewer ranks, or leave it in float "
        "with modules_to_not_convert.",
    )


def _take(tensor: Tensor, dim: int, runs: Sequence[_Interval]) -> Tensor:
    """Return some entries along a dimension: a view of one run, a copy of several."""
    parts = [tensor.narrow(dim, start, end - start) for start, end in runs]
    if len(parts) == 1:
        return parts[0]
    # As bytes where that is what they are: PyTorch 2.8 has no `cat` of float8 on a CPU.
    if tensor.dtype.itemsize == 1:
        return torch.cat([each.view(torch.uint8) for each in parts], dim).view(tensor.dtype)
    return torch.cat(parts, dim)
