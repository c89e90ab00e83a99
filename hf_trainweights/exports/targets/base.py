"""What a target of an export decides: which plain tensors hold a quantized weight, and which ops compute with them."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import Enum, auto

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_trainweights.formats.base import Format
from hf_trainweights.formats.column_scale import COLUMN_SCALE
from hf_trainweights.formats.unpacked import Unpacked, octets_of
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor


class Use(Enum):
    """What the module that owns a weight does with it."""

    LINEAR = auto()
    TABLE = auto()
    OTHER = auto()


@dataclass(frozen=True)
class PlainWeight:
    """A quantized weight as plain tensors.

    Args:
        format: Its format, without column scales.
        dtype: The float dtype that it shows.
        shape: As it is stored, `[*, N, K]`.
        buffers: What `Target.buffers` returned, or what stands for it while an exporter traces.
        column_scale: `[*, 1, K]`, None for none.
    """

    format: Format
    dtype: torch.dtype
    shape: tuple[int, ...]
    buffers: Mapping[str, Tensor]
    column_scale: Tensor | None

    def scale_columns(self, values: Tensor) -> Tensor:
        """Return values `[*, K]` times the column scales."""
        if self.column_scale is None:
            return values
        factors = self.column_scale.to(values.dtype)
        return values * (factors if len(self.shape) > 2 else factors.reshape(-1))

    def unpack(self, buffers: Mapping[str, Tensor]) -> Unpacked:
        """Return the weight taken apart by plain ops, from its buffers or those of some rows."""
        unpacked = self.format.unpack(buffers)
        assert unpacked is not None
        return unpacked


class Target:
    """The plain tensors and ops of one kind of file; by default ATen's, which a format gives (`Format.unpack`).

    Nothing but these is in the exported graph, so its reader needs no code of this package.
    """

    def buffers(self, weight: QuantizedTensor, uses: Set[Use]) -> dict[str, Tensor]:
        """Return the tensors that stand for a weight in a file, besides column scales; a tied one has several uses."""
        del uses
        words = {"qdata": octets_of(weight.qdata)} if weight.qdata.dtype == torch.int32 else {}
        return {name: tensor for name, tensor in {**weight.tensors, **words}.items() if name != COLUMN_SCALE}

    def stored(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the file as ops read it."""
        return tensor

    def unpack(self, weight: PlainWeight) -> Unpacked:
        """Return a weight taken apart by plain ops."""
        return weight.unpack({name: self.stored(tensor) for name, tensor in weight.buffers.items()})

    def dequantize(self, weight: PlainWeight) -> Tensor:
        """Return the stored weight `[*, N, K]` in float32, without its column scales."""
        return self.unpack(weight).weight()

    def look_up(self, weight: PlainWeight, indices: Tensor) -> Tensor:
        """Return rows `[*indices.shape, K]` of a weight `[N, K]` in float32, without its column scales."""
        shared = weight.format.shared_names
        rows = {
            name: self.stored(tensor) if name in shared else F.embedding(indices, self.stored(tensor))
            for name, tensor in weight.buffers.items()
        }
        return weight.unpack(rows).weight()

    def linear(self, weight: PlainWeight, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return `F.linear(x, weight, bias)` of x `[*, K]` and a weight `[N, K]`, with its column scales."""
        return F.linear(x, weight.scale_columns(self.dequantize(weight)).to(weight.dtype), bias)
