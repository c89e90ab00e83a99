"""A quantized weight whose rows are spread over the ranks of FSDP2: what travels between ranks are its stored tensors.

PyTorch calls the two hooks of `ShardedTensor` around each all-gather of `fully_shard`. What a gather returns has no
memory of its own: it is views of the buffers that FSDP fills before a layer runs and frees behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from hf_trainweights.tensor.held_tensor import Held, HeldTensor
from hf_trainweights.tensor.placements import local_tensor


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

    def map_held(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the same rows with `function` applied to every held tensor; see `HeldTensor.map_held`."""
        mapped = super().map_held(function)
        mapped.padded_rows = self.padded_rows
        return mapped

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the weight whose stored tensors have another first dimension, in the layout of files.

        Args:
            function: From a stored tensor `[n, ...]` to one `[m, ...]`, with the same m for each. Tensors that all rows
                share are kept.
        """
        shared = self.shared_names()
        tensors = {name: t if name in shared else function(t) for name, t in self.tensors.items()}
        shape = (tensors["qdata"].shape[0], *self.stored_shape[1:])
        return self.from_held(Held(tensors), self.format, shape, self.dtype, self.transposed)

    def shared_names(self) -> tuple[str, ...]:
        """Return the names of the stored tensors that are whole in every part along the first dimension."""
        return self.format.shared_names if len(self.stored_shape) == 2 else ()

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        """Return what this rank sends: its stored tensors, with rows of zeros where it has fewer than others.

        Args:
            mesh: The ranks. PyTorch also knows a hook of five arguments, but then refuses tensors of other sizes than
                the weight's where rows do not divide by the ranks.
        """
        del mesh
        missing = (self.padded_rows or 0) - self.stored_shape[0]
        padded = pad_rows(self, missing) if missing > 0 else self
        return tuple(tensor.contiguous() for tensor in padded.tensors.values()), None

    def fsdp_post_all_gather(
        self, outputs: Sequence[Tensor], metadata: None, dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Self, tuple[Tensor, ...]] | None:
        """Return the whole weight, rows of padding included, as views of what was gathered.

        Args:
            outputs: The stored tensors of all ranks, one after another.
            metadata: What `fsdp_pre_all_gather` returned.
            dtype: Float dtype that the weight is to show.
            out: The weight of an earlier gather, which holds views of the same buffers; None for the first.

        Returns:
            The weight, and no tensors beyond `outputs` that FSDP is to free; None if there is an `out`.
        """
        del metadata
        if out is not None:
            # A kernel's preparations for the weight were made for the buffer's former memory. Beside a tensor-parallel
            # plan FSDP has wrapped the weight.
            weight = local_tensor(out)
            weight.hold_(weight.held)
            return None
        shared, tensors = self.shared_names(), {}
        for (name, sent), gathered in zip(self.tensors.items(), outputs, strict=True):
            tensors[name] = gathered[: sent.shape[0]] if name in shared else gathered
        shape = (tensors["qdata"].shape[0], *self.stored_shape[1:])
        return self.from_held(Held(tensors), self.format, shape, dtype, self.transposed), ()


def pad_rows(weight: ShardedTensor, rows: int) -> Any:
    """Return a weight with rows of zeros behind its own.

    Args:
        weight: The weight.
        rows: How many.
    """
    return weight.map_rows(lambda stored: torch.cat([stored, stored.new_zeros(rows, *stored.shape[1:])]))
