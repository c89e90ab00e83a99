"""A quantized weight whose rows are sharded over the ranks of FSDP2, which send each other its stored tensors.

PyTorch calls the two hooks of `ShardedTensor` around each all-gather of `fully_shard`. A gathered weight has no memory
of its own: its stored tensors are views of the buffers that FSDP fills before a layer runs and frees after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from hf_trainweights.formats.cutting import can_cut_columns, cut_columns, join_columns
from hf_trainweights.tensor.distributed.placements import local_tensor
from hf_trainweights.tensor.held_tensor import HeldTensor


class ShardedTensor(HeldTensor):
    """The base of `QuantizedTensor` with the functions that FSDP2 needs.

    The shards of the last ranks may have fewer rows than the others, or zero. A collective needs the same number from
    all ranks, so each shard stores that number.
    """

    # The number of rows of each rank's shard after padding; None for a weight that is no shard.
    padded_rows: int | None = None

    def map(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> Self:
        """Return the shard with `function` applied to every stored tensor; see `HeldTensor.map`."""
        mapped = super().map(function, dtype)
        mapped.padded_rows = self.padded_rows
        return mapped

    @property
    def is_cut_by_columns(self) -> bool:
        """Whether the first dimension shown is K: GPT-2's Conv1D keeps its weight `[K, N]`."""
        return self.transposed and len(self.stored_shape) == 2

    def can_be_cut(self, size: int) -> bool:
        """Return whether FSDP may give each rank `size` of the first dimension."""
        length = self.shape[0]
        if not self.is_cut_by_columns:
            return True
        shards = ((start, start + size) for start in range(0, length, max(1, size)))
        return size > 0 and length % size == 0 and all(can_cut_columns(self.format, length, *shard) for shard in shards)

    def zeros(self, size: int) -> Self:
        """Return a shard of zeros whose first dimension is `size`, for which `can_be_cut` must be true."""
        if self.is_cut_by_columns:
            tensors = self.format.empty((self.stored_shape[0], size), self.scale_dtype, self.device)
            return self.holding({name: tensor.zero_() for name, tensor in tensors.items()})
        zeros = self.map_rows(lambda stored: stored.new_zeros(size, *stored.shape[1:]))
        zeros.padded_rows = size
        return zeros

    def chunks(self, size: int) -> list[Self]:
        """Cut the weight into chunks of `size` columns, for which `can_be_cut` must be true."""
        starts = range(0, self.stored_shape[1], size)
        chunks = (cut_columns(self.format, self.tensors, self.stored_shape, start, start + size) for start in starts)
        return [self.holding(chunk) for chunk in chunks]

    def join(self, gathered: Mapping[str, Tensor], dtype: torch.dtype) -> Self:
        """Join the stored tensors of all ranks' shards, each gathered into one tensor, to the unsharded weight.

        Its stored tensors are views of the gathered ones, or new tensors if the weight is cut by columns.
        """
        if not self.is_cut_by_columns:
            shared = self.shared_along(0)  # a tensor that all rows share has arrived once for each rank
            return self.holding({name: t[:1] if name in shared else t for name, t in gathered.items()}, dtype)
        rows, length = self.stored_shape
        ranks = gathered["qdata"].shape[0] // rows
        split = {name: tensor.chunk(ranks) for name, tensor in gathered.items()}
        shards = [{name: tensors[rank] for name, tensors in split.items()} for rank in range(ranks)]
        joined = join_columns(self.format, shards, [length] * ranks)
        # A tensor that all shards share is still a view of the buffer, with which FSDP would free it.
        return self.holding({name: t if t._base is None else t.clone() for name, t in joined.items()}, dtype)

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the weight with `function` applied to its stored tensors, except those that all rows share."""
        shared = self.shared_along(0)
        return self.holding({name: t if name in shared else function(t) for name, t in self.tensors.items()})

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        """Return the tensors that this rank sends: its stored tensors, with rows of zeros if it has fewer than others.

        PyTorch also accepts a hook of five arguments. But then it refuses tensors of other sizes than the weight's if
        the number of rows is no multiple of the number of ranks.
        """
        del mesh
        missing = (self.padded_rows or 0) - self.stored_shape[0]
        padded = pad_rows(self, missing) if missing > 0 else self
        return tuple(tensor.contiguous() for tensor in padded.tensors.values()), None

    def fsdp_post_all_gather(
        self, outputs: Sequence[Tensor], metadata: None, dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Self, tuple[Tensor, ...]] | None:
        """Return the unsharded weight, rows of padding included, and the tensors beside `outputs` that FSDP is to free.

        If `out` is the weight of an earlier gather, which holds views of the same buffers, fill it and return None.
        """
        del metadata
        names = self.format.tensor_names
        # If there is one rank, PyTorch passes on the first tensor alone.
        gathered = dict(zip(names, outputs, strict=True)) if len(outputs) == len(names) else self.tensors
        if out is None:
            joined = self.join(gathered, dtype)
            return joined, tuple(joined.held.tensors.values()) if self.is_cut_by_columns else ()
        # If there is a tensor-parallel plan, too, FSDP has wrapped the weight in a DTensor.
        weight = local_tensor(out)
        if self.is_cut_by_columns:
            for name, tensor in self.join(gathered, dtype).held.tensors.items():
                weight.held.tensors[name].copy_(tensor)
        weight.hold_(weight.held)  # drops a kernel's function that was prepared for the buffer's former memory
        return None


def pad_rows(weight: ShardedTensor, rows: int) -> Any:
    """Return a weight with `rows` more rows, of zeros, at the end."""
    return weight.map_rows(lambda stored: torch.cat([stored, stored.new_zeros(rows, *stored.shape[1:])]))
