"""What `data_ptr` of a quantized weight returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_trainweights.errors import UnsupportedError


@dataclass(frozen=True, eq=False)
class Identity:
    """What `data_ptr` of a quantized weight returns: good for telling weights apart, and for nothing else.

    As a number it would make safetensors and Triton kernels read the float weight's bytes there, far past `qdata`.
    """

    address: int

    def _refuse(self, *_: object) -> Any:
        raise UnsupportedError(
            "data_ptr",
            "a plain tensor",
            "a quantized weight, whose float values are nowhere in memory",
            "To save it, call hf_trainweights.save_file, torch.save or the model's save_pretrained; of accelerate, "
            "save_state(directory, safe_serialization=False). For anything else call dequantize() first.",
        )

    def __eq__(self, other: object) -> bool:
        # safetensors asks for the address 0 before it hands the address to ctypes, which would wrap the error.
        if type(other) is int and other == 0:
            self._refuse()
        return isinstance(other, Identity) and self.address == other.address

    def __ne__(self, other: object) -> bool:
        return not (isinstance(other, Identity) and self.address == other.address)

    def __hash__(self) -> int:
        return hash((Identity, self.address))

    def __mod__(self, divisor: int) -> int:
        # Transformers asks whether expert weights are aligned before it chooses how to multiply them.
        return self.address % divisor

    __int__ = __index__ = __lt__ = __le__ = __gt__ = __ge__ = __add__ = _refuse
    _as_parameter_ = property(_refuse)
