"""Quantized layers in the part of Python that TorchScript compiles; it knows no annotations that are texts."""

import torch.nn.functional as F
from torch import Tensor, nn

from hf_trainweights.exports.lowered_weight import LoweredWeight
from hf_trainweights.exports.targets.aten import codes_of, scaled


class ScriptedLinear(nn.Module):
    """A Linear of plain tensors.

    Args:
        weight: Its weight.
        bias: Its bias, or None.
    """

    _weight_qdata: Tensor
    _weight_scale: Tensor

    def __init__(self, weight: LoweredWeight, bias: Tensor | None):
        super().__init__()
        for name, tensor in weight.plain.buffers.items():
            self.register_buffer(f"_weight_{name}", tensor)
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Multiply by the dequantized weight."""
        weight = scaled(codes_of(self._weight_qdata), self._weight_scale)
        return F.linear(input, weight.to(self.dtype), self.bias)


class ScriptedEmbedding(nn.Module):
    """An Embedding of plain tensors.

    Args:
        weight: Its table.
    """

    _weight_qdata: Tensor
    _weight_scale: Tensor

    def __init__(self, weight: LoweredWeight):
        super().__init__()
        for name, tensor in weight.plain.buffers.items():
            self.register_buffer(f"_weight_{name}", tensor)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.dtype = weight.dtype

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Dequantize the rows that are looked up."""
        codes = codes_of(F.embedding(input, self._weight_qdata))
        return scaled(codes, F.embedding(input, self._weight_scale)).to(self.dtype)


def scripted_layer(module: nn.Module) -> nn.Module | None:
    """Return the module that TorchScript compiles in the place of a lowered one; None for one that it leaves alone.

    Args:
        module: A module of a lowered model.
    """
    weight = vars(module).get("weight")
    if isinstance(weight, LoweredWeight):
        if type(module).forward is nn.Linear.forward:
            return ScriptedLinear(weight, module.bias)  # type: ignore[arg-type]
        if type(module).forward is nn.Embedding.forward and module.max_norm is None:
            return ScriptedEmbedding(weight)
    return None
