"""What a target of an export decides: which plain tensors hold a quantized weight, and which ops compute with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_trainweights.formats.base import Format
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
        format: Its format.
        dtype: The float dtype that it shows.
        buffers: What `Target.buffers` returned, or what stands for it while an exporter traces.
    """

    format: Format
    dtype: torch.dtype
    buffers: Mapping[str, Tensor]

    @property
    def columns(self) -> int:
        """K, the number of columns of the weight."""
        return self.format.shape_of(self.buffers["qdata"])[-1]

    @property
    def groups(self) -> int:
        """G, the number of groups of a row."""
        return self.buffers["scale"].shape[-1]


class Target(ABC):
    """The plain tensors and ops of one kind of file.

    Nothing but these is in the exported graph, so its reader needs no code of this package.
    """

    name: ClassVar[str]
    format_names: ClassVar[tuple[str, ...]] = ("int8", "int4", "float8_e4m3")
    holds_column_scales: ClassVar[bool] = False

    @abstractmethod
    def buffers(self, weight: QuantizedTensor, uses: Set[Use]) -> dict[str, Tensor]:
        """Return the tensors that stand for a weight in the file; `qdata` and `scale` are among them.

        Args:
            weight: A weight as it lies in files.
            uses: What the modules that own it do with it; a tied weight has several.

        Raises:
            UnsupportedError: The target cannot hold such a weight.
        """

    @abstractmethod
    def dequantize(self, weight: PlainWeight) -> Tensor:
        """Return the stored weight `[*, N, K]` in its dtype.

        Args:
            weight: The weight.
        """

    @abstractmethod
    def look_up(self, weight: PlainWeight, indices: Tensor) -> Tensor:
        """Return rows of a weight.

        Args:
            weight: A weight `[N, K]`.
            indices: Integers of any shape.

        Returns:
            `[*indices.shape, K]` in the weight's dtype.
        """

    def linear(self, weight: PlainWeight, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return `F.linear(x, weight, bias)`.

        Args:
            weight: A weight `[N, K]`.
            x: `[*, K]`.
            bias: `[N]`, or None.
        """
        return F.linear(x, self.dequantize(weight), bias)
