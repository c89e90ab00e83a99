"""ATen ops: what TorchScript, torch.export and AOTInductor hold, and what libtorch runs."""

from __future__ import annotations

from collections.abc import Set

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_trainweights.exports.targets.base import PlainWeight, Target, Use
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor


def codes_of(qdata: Tensor) -> Tensor:
    """Return stored codes as float32, in any language that PyTorch compiles to.

    Args:
        qdata: Int8 or float8 `[*, K]`, or int32 words `[*, K / 8]` of eight 4-bit codes, each + 8.

    Returns:
        New float32 `[*, K]`.
    """
    if qdata.dtype == torch.int32:
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=qdata.device)
        nibbles = (qdata.unsqueeze(-1) >> shifts) & 15
        qdata = torch.flatten(nibbles - 8, -2)
    return qdata.to(torch.float32)


def scaled(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the product of codes and scales, in float32.

    Args:
        codes: Float32 `[*, K]`.
        scale: `[*, G]`.
    """
    groups = codes.unflatten(-1, [scale.size(-1), codes.size(-1) // scale.size(-1)])
    return torch.flatten(groups * scale.to(torch.float32).unsqueeze(-1), -2)


class Aten(Target):
    """The codes as they lie, and plain arithmetic on them."""

    name = "ATen"

    def buffers(self, weight: QuantizedTensor, uses: Set[Use]) -> dict[str, Tensor]:
        """Return the stored tensors."""
        del uses
        return dict(weight.tensors)

    def dequantize(self, weight: PlainWeight) -> Tensor:
        """Return the product of codes and scales, rounded once."""
        return scaled(codes_of(weight.buffers["qdata"]), weight.buffers["scale"]).to(weight.dtype)

    def look_up(self, weight: PlainWeight, indices: Tensor) -> Tensor:
        """Dequantize the rows that are looked up."""
        codes = codes_of(F.embedding(indices, weight.buffers["qdata"]))
        return scaled(codes, F.embedding(indices, weight.buffers["scale"])).to(weight.dtype)
