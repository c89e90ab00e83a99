"""A quantized weight whose rows are spread over the ranks of FSDP2: what travels between ranks are its stored tensors.

PyTorch calls the two hooks of `ShardedTensor` around each all-gather of `fully_shard`. What a gather returns has no
memory of its own: it is views of the buffers that FSDP fills before a layer runs and frees behind it.
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
    """What `QuantizedTensor` is to FSDP2.

    A shard of the last ranks may have fewer rows than the others, or none. A collective needs the same number from
    all, so each shard knows it.
    """

    # Rows that the shard of every rank has when padded; None for a weight that is no shard.
    padded_rows: int | None = None

    def map(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> Self:
        """Return the same rows with `function` applied to every stored tensor; see `HeldTensor.map`."""
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
        parts = ((start, start + size) for start in range(0, length, max(1, size)))
        return size > 0 and length % size == 0 and all(can_cut_columns(self.format, length, *part) for part in parts)

    def zeros(self, size: int) -> Self:
        """Return a shard of zeros whose first dimension is `size`, for which `can_be_cut`."""
        if self.is_cut_by_columns:
            tensors = self.format.empty((self.stored_shape[0], size), self.scale_dtype, self.device)
            return self.holding({name: tensor.zero_() for name, tensor in tensors.items()})
        zeros = self.map_rows(lambda stored: stored.new_zeros(size, *stored.shape[1:]))
        zeros.padded_rows = size
        return zeros

    def chunks(self, size: int) -> list[Self]:
        """Return the weight in parts of `size` columns, for which `can_be_cut`."""
        starts = range(0, self.stored_shape[1], size)
        parts = (cut_columns(self.format, self.tensors, self.stored_shape, start, start + size) for start in starts)
        return [self.holding(part) for part in parts]

    def join(self, gathered: Mapping[str, Tensor], dtype: torch.dtype) -> Self:
        """Return the weight of which all ranks have a shard like this one, from their tensors one behind another.

        It holds views of what was gathered, but new tensors where it is cut by columns.
        """
        if not self.is_cut_by_columns:
            shared = self.shared_along(0)
            return self.holding({name: t[:1] if name in shared else t for name, t in gathered.items()}, dtype)
        rows, length = self.stored_shape
        ranks = gathered["qdata"].shape[0] // rows
        split = {name: tensor.chunk(ranks) for name, tensor in gathered.items()}
        parts = [{name: tensors[rank] for name, tensors in split.items()} for rank in range(ranks)]
        joined = join_columns(self.format, parts, [length] * ranks)
        # Where a part had the whole tensor, it is a view, which FSDP would free with the buffer.
        return self.holding({name: t if t._base is None else t.clone() for name, t in joined.items()}, dtype)

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the weight with each stored tensor `[n, ...]` mapped to `[m, ...]`, but for those that rows share."""
        shared = self.shared_along(0)
        return self.holding({name: t if name in shared else function(t) for name, t in self.tensors.items()})

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        """Return what this rank sends: its stored tensors, with rows of zeros where it has fewer than others.

        PyTorch also knows a hook of five arguments, but then refuses tensors of other sizes than the weight's where
        rows do not divide by the ranks.
        """
        del mesh
        missing = (self.padded_rows or 0) - self.stored_shape[0]
        padded = pad_rows(self, missing) if missing > 0 else self
        return tuple(tensor.contiguous() for tensor in padded.tensors.values()), None

    def fsdp_post_all_gather(
        self, outputs: Sequence[Tensor], metadata: None, dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Self, tuple[Tensor, ...]] | None:
        """Return the whole weight, rows of padding included, and the tensors beyond `outputs` that FSDP is to free.

        Where `out` is the weight of an earlier gather, which holds views of the same buffers, fill it and return None.
        """
        del metadata
        names = self.format.tensor_names
        # Where there is one rank, PyTorch passes on the first tensor alone.
        gathered = dict(zip(names, outputs, strict=True)) if len(outputs) == len(names) else self.tensors
        if out is None:
            whole = self.join(gathered, dtype)
            return whole, tuple(whole.held.tensors.values()) if self.is_cut_by_columns else ()
        # Beside a tensor-parallel plan FSDP has wrapped the weight.
        weight = local_tensor(out)
        if self.is_cut_by_columns:
            for name, tensor in self.join(gathered, dtype).held.tensors.items():
                weight.held.tensors[name].copy_(tensor)
        weight.hold_(weight.held)  # a kernel's preparations for the weight were made for the buffer's former memory
        return None


def pad_rows(weight: ShardedTensor, rows: int) -> Any:
    """Return a weight with so many rows of zeros behind its own."""
    return weight.map_rows(lambda stored: torch.cat([stored, stored.new_zeros(rows, *stored.shape[1:])]))
