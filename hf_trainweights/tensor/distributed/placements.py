"""What ranks hold of tensors: the rows and columns that a DTensor's placements give to each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.cutting import can_cut_columns

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Half-open, in elements of one dimension of the stored weight.
Interval = tuple[int, int]


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

    def own_intervals(self) -> list[list[Interval]]:
        """Return what this rank holds of each dimension of the stored weight."""
        # A rank that is not in the mesh holds nothing; what it is told does not matter.
        return self.intervals(self.whole.device_mesh.get_coordinate() or [0] * self.whole.device_mesh.ndim)

    def gathered_rows(self) -> int | None:
        """Return how many rows, or experts, each rank sends where FSDP gathers; None where it does not.

        The last ranks may hold fewer and send padding.
        """
        mesh = self.whole.device_mesh
        gathers = ["fsdp" in name for name in mesh.mesh_dim_names or ()]
        own = mesh.get_coordinate()
        if own is None or not any(gathers):
            return None
        # The first of the ranks that gather from each other has the most.
        first = [0 if gathered else place for place, gathered in zip(own, gathers, strict=True)]
        return sizes_of(self.intervals(first))[0]

    def intervals(self, coordinate: Sequence[int]) -> list[list[Interval]]:
        """Return what the rank at a place of the mesh holds of each dimension of the stored weight."""
        own = [torch.arange(size, device="cpu") for size in self.stored_shape]
        mesh_shape, placements = self.whole.device_mesh.shape, self.whole.placements
        for placement, dim, rank, ranks in zip(placements, self.stored_dims, coordinate, mesh_shape, strict=True):
            if dim is not None:
                own[dim] = _cut(own[dim], placement, ranks)[rank]
        return [_runs(indices) for indices in own]


def is_distributed(tensor: object) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor, of which this rank may hold a part."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_tensor(tensor: Any) -> Any:
    """Return what this rank holds of a tensor: the local part of a DTensor, any other tensor itself."""
    if not is_distributed(tensor):
        return tensor
    # With gradients it would be an alias that is recorded.
    with torch.no_grad():
        return tensor.to_local()


def with_local(tensor: DTensor, local: Tensor) -> DTensor:
    """Return a DTensor of the shape, mesh and placements of another one, with another local part, which is kept."""
    from torch.distributed.tensor import DTensor

    mesh, shape, stride = tensor.device_mesh, tensor.shape, tensor.stride()
    return DTensor.from_local(local, mesh, tensor.placements, run_check=False, shape=shape, stride=stride)


def check_parts(placed: Placed) -> None:
    """Check that a weight can be cut for all ranks, each of which finds the same; UnsupportedError: it cannot."""
    form, shape, ranks_along = placed.format, placed.stored_shape, placed.whole.device_mesh.shape
    for dim, size in enumerate(shape):
        cuts_columns = dim == len(shape) - 1
        parts = [torch.arange(size, device="cpu")]
        for placement, cut, ranks in zip(placed.whole.placements, placed.stored_dims, ranks_along, strict=True):
            if cut == dim:
                parts = [each for part in parts for each in _cut(part, placement, ranks)]
        for part in parts:
            sizes = (*shape[:dim], len(part), *shape[dim + 1 :])
            whole_groups = not cuts_columns or all(can_cut_columns(form, size, *run) for run in _runs(part))
            if 0 in sizes or not whole_groups or form.fallback((*shape[:-1], sizes[-1])) != form:
                raise _uncuttable(placed, sizes)


def _cut(indices: Tensor, placement: Any, ranks: int) -> list[Tensor]:
    """Return the indices that each rank along a dimension of the mesh gets of those that they share."""
    # A packed weight, such as gate and up, is cut within each of its parts.
    packed = [part.chunk(ranks) for part in indices.chunk(getattr(placement, "split_factor", 1))]
    none = indices[:0]
    return [
        torch.cat([none, *(part for chunks in packed for part in chunks[rank : rank + 1])]) for rank in range(ranks)
    ]


def _runs(indices: Tensor) -> list[Interval]:
    """Return increasing indices as intervals."""
    if not len(indices):
        return []
    last = (indices.diff() != 1).nonzero().flatten()
    starts, ends = [0, *(last + 1).tolist()], [*last.tolist(), len(indices) - 1]
    return [(int(indices[start]), int(indices[end]) + 1) for start, end in zip(starts, ends, strict=True)]


def sizes_of(intervals: Sequence[Sequence[Interval]]) -> tuple[int, ...]:
    """Return the shape of a part."""
    return tuple(sum(end - start for start, end in runs) for runs in intervals)


def _uncuttable(placed: Placed, part: Sequence[int]) -> UnsupportedError:
    ranks = " x ".join(map(str, placed.whole.device_mesh.shape))
    sizes = f"{tuple(part)} of [*, N, K] = {placed.stored_shape}"
    return UnsupportedError(
        placed.name,
        f"a weight in {placed.format} that {placed.plan} can cut for {ranks} ranks between its groups",
        f"a part of {sizes}",
        "Choose a smaller group_size, another format for this weight with overrides, fewer ranks, or leave it in float "
        "with modules_to_not_convert.",
    )
