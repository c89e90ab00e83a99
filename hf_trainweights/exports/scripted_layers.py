"""Quantized layers in the part of Python that TorchScript compiles; it knows no annotations that are texts."""

from typing import Any

import torch
from torch import Tensor, nn

from hf_trainweights.exports.lowered_weight import LoweredWeight


class ScriptedLinear(nn.Module):
    """A lowered Linear of plain tensors."""

    def __init__(self, module: nn.Linear, weight: LoweredWeight):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # What a format needs is recorded, because TorchScript compiles little of Python.
        self.recorded: Any = torch.jit.trace(
            module, torch.zeros(1, self.in_features, dtype=weight.dtype), check_trace=False
        )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Multiply by the dequantized weight."""
        return self.recorded(input)


class ScriptedEmbedding(nn.Module):
    """A lowered Embedding of plain tensors."""

    def __init__(self, module: nn.Embedding, weight: LoweredWeight):
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        self.recorded: Any = torch.jit.trace(module, torch.zeros(1, dtype=torch.int64), check_trace=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Dequantize the rows that are looked up."""
        return self.recorded(input)


def scripted_layer(module: nn.Module) -> nn.Module | None:
    """Return the module that TorchScript compiles in the place of a lowered one; None for one that it leaves alone."""
    weight = vars(module).get("weight")
    if isinstance(weight, LoweredWeight):
        if type(module).forward is nn.Linear.forward:
            return ScriptedLinear(module, weight)  # type: ignore[arg-type]
        if type(module).forward is nn.Embedding.forward and module.max_norm is None:
            return ScriptedEmbedding(module, weight)  # type: ignore[arg-type]
    return None
