"""What an export is made from: a model or the directory of a saved one, and weights in the format of their tensors."""

from __future__ import annotations

import os
from typing import TypeVar

import torch
from torch import nn

from hf_trainweights.formats.coded import Coded
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.models.loading.saved_models import load_saved
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

_Value = TypeVar("_Value")


def model_of(source: nn.Module | str | os.PathLike[str], dtype: torch.dtype | str = "auto") -> nn.Module:
    """Return a model as it is, or the one that was saved to a directory, by default in the dtypes it was saved in."""
    return source if isinstance(source, nn.Module) else load_saved(source, dtype=dtype)


def as_int8(value: _Value) -> _Value:
    """Return a coded weight as the int8 weight of the same tensors, anything else as it is."""
    if not isinstance(value, QuantizedTensor) or not isinstance(value.format, Coded):
        return value
    return QuantizedTensor.from_held(value.held, Int8(), value.stored_shape, value.dtype, value.transposed)  # type: ignore[return-value]
