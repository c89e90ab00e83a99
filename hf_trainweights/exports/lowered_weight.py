"""What stands where a quantized weight was while a model is lowered."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hf_trainweights.exports.targets.base import PlainWeight, Target
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor


class LoweredWeight:
    """Answers `F.linear` and `F.embedding` by a target's ops; for anything else it is the dequantized weight.

    Args:
        module: The module that owned the weight. Its buffers are read at each use, since exporters exchange them.
        name: The weight's name there.
        keys: The names of its tensors, each the end of a buffer's name.
        weight: The quantized weight.
        target: The ops to compute with.
    """

    def __init__(self, module: nn.Module, name: str, keys: tuple[str, ...], weight: QuantizedTensor, target: Target):
        self._module, self._name, self._keys, self._target = module, name, keys, target
        self._format, self._transposed = weight.format, weight.transposed
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device

    @property
    def plain(self) -> PlainWeight:
        """The weight as the plain tensors that its module holds."""
        buffers = {key: getattr(self._module, f"_{self._name}_{key}") for key in self._keys}
        return PlainWeight(self._format, self.dtype, buffers)

    def dequantize(self) -> Tensor:
        """Return the float weight, of the shape that the module knows."""
        weight = self._target.dequantize(self.plain)
        return weight.transpose(-1, -2) if self._transposed else weight

    def __getattr__(self, name: str) -> Any:
        # Python and PyTorch look for hooks of their own by names such as __torch_script__.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dequantize(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.dequantize()[index]

    def __len__(self) -> int:
        return self.shape[0]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        del types
        first, second, third, *_ = (*args, None, None, None)
        if isinstance(second, cls) and second._is_matrix:
            if func is F.linear:
                return second._target.linear(second.plain, first, kwargs.get("bias", third))
            # With max_norm the lookup changes the weight.
            if func is F.embedding and kwargs.get("max_norm") is None:
                return second._target.look_up(second.plain, first)
        return func(*map(_dequantized, args), **{name: _dequantized(value) for name, value in kwargs.items()})

    @property
    def _is_matrix(self) -> bool:
        return len(self.shape) == 2 and not self._transposed


def _dequantized(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_dequantized, value))
    return value.dequantize() if isinstance(value, LoweredWeight) else value
