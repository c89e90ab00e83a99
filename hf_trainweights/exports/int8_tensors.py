"""Weights whose stored tensors are those of int8, shown to exports as int8."""

from __future__ import annotations

from typing import TypeVar

from hf_trainweights.formats.coded import Coded
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

_Value = TypeVar("_Value")


def as_int8(value: _Value) -> _Value:
    """Return a coded weight as the int8 weight of the same tensors, anything else as it is."""
    if not isinstance(value, QuantizedTensor) or not isinstance(value.format, Coded):
        return value
    return QuantizedTensor.from_held(value.held, Int8(), value.stored_shape, value.dtype, value.transposed)  # type: ignore[return-value]
