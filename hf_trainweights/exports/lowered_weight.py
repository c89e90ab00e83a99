"""What stands where a quantized weight was while a model is lowered."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hf_trainweights.exports.targets.base import PlainWeight, Target
from hf_trainweights.formats.column_scale import COLUMN_SCALE, ColumnScaled
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor


class LoweredWeight:
    """Answers `F.linear` and `F.embedding` by a target's ops; for anything else it is the dequantized weight.

    Its tensors are the module's buffers `_<name>_<key>`, read at each use, since exporters exchange them.
    """

    def __init__(self, module: nn.Module, name: str, keys: tuple[str, ...], weight: QuantizedTensor, target: Target):
        self._module, self._name, self._keys, self._target = module, name, keys, target
        form = weight.format
        self._format, self._transposed = form.inner if isinstance(form, ColumnScaled) else form, weight.transposed
        self._stored_shape = tuple(weight.stored_shape)
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device

    @property
    def plain(self) -> PlainWeight:
        """The weight as the plain tensors that its module holds."""
        buffers = {key: getattr(self._module, f"_{self._name}_{key}") for key in self._keys}
        column_scale = buffers.pop(COLUMN_SCALE, None)
        return PlainWeight(self._format, self.dtype, self._stored_shape, buffers, column_scale)

    def dequantize(self) -> Tensor:
        """Return the float weight, of the shape that the module knows."""
        plain = self.plain
        weight = plain.scale_columns(self._target.dequantize(plain)).to(self.dtype)
        return weight.transpose(-1, -2) if self._transposed else weight

    def look_up(self, indices: Tensor) -> Tensor:
        """Return rows of a weight `[N, K]`."""
        plain = self.plain
        return plain.scale_columns(self._target.look_up(plain, indices)).to(self.dtype)

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
                return second.look_up(first)
        return func(*map(_dequantized, args), **{name: _dequantized(value) for name, value in kwargs.items()})

    @property
    def _is_matrix(self) -> bool:
        return len(self.shape) == 2 and not self._transposed


def _dequantized(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_dequantized, value))
    return value.dequantize() if isinstance(value, LoweredWeight) else value
