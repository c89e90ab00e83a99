"""Quantized layers in the part of Python that TorchScript compiles; it knows no annotations that are texts."""

from typing import Any

import torch
from torch import Tensor, nn

from hf_trainweights.exports.lowered_weight import LoweredWeight


class ScriptedLayer(nn.Module):
    """A lowered Linear or Embedding of plain tensors, with the sizes that its model may ask it for."""

    def __init__(self, module: nn.Module, example: Tensor, **sizes: int):
        super().__init__()
        for name, size in sizes.items():
            setattr(self, name, size)
        # What a format needs is recorded, because TorchScript compiles little of Python.
        self.recorded: Any = torch.jit.trace(module, example, check_trace=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Call the layer."""
        return self.recorded(input)


def scripted_layer(module: Any) -> nn.Module | None:
    """Return the module that TorchScript compiles in the place of a lowered one; None for one that it leaves alone."""
    weight = vars(module).get("weight")
    if isinstance(weight, LoweredWeight):
        if type(module).forward is nn.Linear.forward:
            rows, columns = weight.shape
            x = torch.zeros(1, columns, dtype=weight.dtype)
            return ScriptedLayer(module, x, out_features=rows, in_features=columns)
        if type(module).forward is nn.Embedding.forward and module.max_norm is None:
            rows, columns = weight.shape
            x = torch.zeros(1, dtype=torch.int64)
            return ScriptedLayer(module, x, num_embeddings=rows, embedding_dim=columns)
    return None
