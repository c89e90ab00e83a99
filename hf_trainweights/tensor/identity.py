"""What `data_ptr` of a quantized weight returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_trainweights.errors import UnsupportedError


@dataclass(frozen=True)
class Identity:
    """What `data_ptr` of a quantized weight returns: good for telling weights apart, and for nothing else.

    As a number it would make safetensors and Triton kernels read the float weight's bytes there, far past `qdata`.

    Args:
        address: Address of `qdata`.
    """

    address: int

    def _refuse(self, *_: object) -> Any:
        raise UnsupportedError(
            "data_ptr",
            "a plain tensor",
            "a quantized weight, whose float values are nowhere in memory",
            "Use torch.save, or save_pretrained of a model that from_pretrained quantized, or dequantize() it first.",
        )

    def __mod__(self, divisor: int) -> int:
        # Transformers asks whether expert weights are aligned before it chooses how to multiply them.
        return self.address % divisor

    __int__ = __index__ = __lt__ = __le__ = __gt__ = __ge__ = __add__ = _refuse
    _as_parameter_ = property(_refuse)
