"""The shards of tensors on ranks: the rows and columns that a DTensor's placements give to each rank."""

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

# Start and end, in elements of one dimension of the stored weight; the end is excluded.
Interval = tuple[int, int]


class Placed(NamedTuple):
    """A weight and the way it is cut.

    Args:
        name: Full name of the weight.
        format: Its format.
        transposed: As for `QuantizedTensor`.
        whole: The weight's parameter, or the one that it is to replace, with its unsharded shape, mesh and placements.
        plan: The style of the tensor-parallel plan that cuts it, for errors.
    """

    name: str
    format: Format
    transposed: bool
    whole: DTensor
    plan: str = "its placements"

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the unsharded stored weight, `[*, N, K]`."""
        *lead, N, K = self.whole.shape
        return (*lead, K, N) if self.transposed else (*lead, N, K)

    @property
    def stored_dims(self) -> list[int | None]:
        """For each dimension of the mesh, the stored dimension that is cut along it; None if ranks hold the same."""
        last, dims = self.whole.dim() - 1, [getattr(placement, "dim", None) for placement in self.whole.placements]
        dims = [None if dim is None else dim % (last + 1) for dim in dims]
        # A transposed weight is stored with its last two dimensions exchanged: `last` for `last - 1`, and back.
        return [2 * last - 1 - dim if self.transposed and dim is not None and dim >= last - 1 else dim for dim in dims]

    def own_intervals(self) -> list[list[Interval]]:
        """Return the intervals of each stored dimension that this rank holds."""
        # A rank that is not in the mesh holds no shard, and any answer will do.
        return self.intervals(self.whole.device_mesh.get_coordinate() or [0] * self.whole.device_mesh.ndim)

    def gathered_rows(self) -> int | None:
        """Return how many rows, or experts, each rank sends when FSDP gathers; None if FSDP does not cut the weight.

        The last ranks may hold fewer and send padding.
        """
        mesh = self.whole.device_mesh
        gathers = ["fsdp" in name for name in mesh.mesh_dim_names or ()]
        own = mesh.get_coordinate()
        if own is None or not any(gathers):
            return None
        # Among the ranks that gather from each other, the first one has the most rows.
        first = [0 if gathered else position for position, gathered in zip(own, gathers, strict=True)]
        return sizes_of(self.intervals(first))[0]

    def intervals(self, coordinate: Sequence[int]) -> list[list[Interval]]:
        """Return the intervals of each stored dimension that the rank at a coordinate of the mesh holds."""
        own = [torch.arange(size, device="cpu") for size in self.stored_shape]
        mesh_shape, placements = self.whole.device_mesh.shape, self.whole.placements
        for placement, dim, rank, ranks in zip(placements, self.stored_dims, coordinate, mesh_shape, strict=True):
            if dim is not None:
                own[dim] = _cut(own[dim], placement, ranks)[rank]
        return [_runs(indices) for indices in own]


def is_distributed(tensor: object) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor, of which this rank may hold a shard."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_tensor(tensor: Any) -> Any:
    """Return this rank's shard of a DTensor, or any other tensor itself."""
    if not is_distributed(tensor):
        return tensor
    # While gradients are enabled autograd would record an alias of the shard.
    with torch.no_grad():
        return tensor.to_local()


def with_local(tensor: DTensor, local: Tensor) -> DTensor:
    """Return a DTensor like another one, but with another local shard, which is not copied."""
    from torch.distributed.tensor import DTensor

    mesh, shape, stride = tensor.device_mesh, tensor.shape, tensor.stride()
    return DTensor.from_local(local, mesh, tensor.placements, run_check=False, shape=shape, stride=stride)


def check_parts(placed: Placed) -> None:
    """Check that a weight can be cut for all ranks; UnsupportedError: it cannot. Each rank comes to the same result."""
    form, shape, ranks_along = placed.format, placed.stored_shape, placed.whole.device_mesh.shape
    for dim, size in enumerate(shape):
        cuts_columns = dim == len(shape) - 1
        shards = [torch.arange(size, device="cpu")]
        for placement, cut, ranks in zip(placed.whole.placements, placed.stored_dims, ranks_along, strict=True):
            if cut == dim:
                shards = [smaller for shard in shards for smaller in _cut(shard, placement, ranks)]
        for shard in shards:
            sizes = (*shape[:dim], len(shard), *shape[dim + 1 :])
            keeps_groups = not cuts_columns or all(can_cut_columns(form, size, *run) for run in _runs(shard))
            # `fallback` returns another format if this one cannot hold the columns of the shard.
            if 0 in sizes or not keeps_groups or form.fallback((*shape[:-1], sizes[-1])) != form:
                raise _uncuttable(placed, sizes)


def _cut(indices: Tensor, placement: Any, ranks: int) -> list[Tensor]:
    """Divide indices among the ranks along a dimension of the mesh."""
    # A packed weight, such as gate and up, is cut within each of the weights that it is packed of.
    packed = [weight.chunk(ranks) for weight in indices.chunk(getattr(placement, "split_factor", 1))]
    empty = indices[:0]
    return [
        torch.cat([empty, *(chunk for chunks in packed for chunk in chunks[rank : rank + 1])]) for rank in range(ranks)
    ]


def _runs(indices: Tensor) -> list[Interval]:
    """Return the intervals that increasing indices make up."""
    if not len(indices):
        return []
    last = (indices.diff() != 1).nonzero().flatten()
    starts, ends = [0, *(last + 1).tolist()], [*last.tolist(), len(indices) - 1]
    return [(int(indices[start]), int(indices[end]) + 1) for start, end in zip(starts, ends, strict=True)]


def sizes_of(intervals: Sequence[Sequence[Interval]]) -> tuple[int, ...]:
    """Return the shape of a shard that has these intervals of each dimension."""
    return tuple(sum(end - start for start, end in runs) for runs in intervals)


def _uncuttable(placed: Placed, shard_shape: Sequence[int]) -> UnsupportedError:
    ranks = " x ".join(map(str, placed.whole.device_mesh.shape))
    sizes = f"{tuple(shard_shape)} of [*, N, K] = {placed.stored_shape}"
    return UnsupportedError(
        placed.name,
        f"a weight in {placed.format} that {placed.plan} can cut for {ranks} ranks between its groups",
        f"a part of {sizes}",
        "Choose a smaller group_size, another format for this weight with overrides, fewer ranks, or leave it in float "
        "with modules_to_not_convert.",
    )
