"""What an export is made from: a model or the directory of a saved one, and weights in the format of their tensors."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_trainweights.errors import ConfigError, UnsupportedError
from hf_trainweights.formats.coded import Coded
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.models.host.models import has_adapters
from hf_trainweights.models.loading.saved_models import load_saved
from hf_trainweights.models.saving.saved_tensors import whole_state_dict
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor


def model_of(source: nn.Module | str | os.PathLike[str], dtype: torch.dtype | str = "auto") -> nn.Module:
    """Return a model as it is, or the one that was saved to a directory, by default in the dtypes it was saved in."""
    return source if isinstance(source, nn.Module) else load_saved(source, dtype=dtype)


def tensors_to_write(model: PreTrainedModel) -> dict[str, Any]:
    """Return all tensors of a quantized model by name, a tied weight once, a coded one as int8 with the same tensors.

    ConfigError: none is quantized; UnsupportedError: the model has adapters.
    """
    state_dict = whole_state_dict(model)
    if not any(isinstance(tensor, QuantizedTensor) for tensor in state_dict.values()):
        raise ConfigError("model", "quantized weights", "none", "Quantize the model first.")
    if has_adapters(model):
        raise UnsupportedError("model", "a model by itself", "one with adapters", "Save them, then delete_adapter.")
    return {name: _as_int8(tensor) for name, tensor in state_dict.items()}


def _as_int8(value: Any) -> Any:
    if not isinstance(value, QuantizedTensor) or not isinstance(value.format, Coded):
        return value
    return QuantizedTensor.from_held(value.held, Int8(), value.stored_shape, value.dtype, value.transposed)
