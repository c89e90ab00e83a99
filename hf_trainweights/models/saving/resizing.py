"""resize_token_embeddings of a quantized model: old rows keep their codes, new rows are quantized likewise."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_trainweights.tensor.modules import as_parameter, parameter_places, put_parameter
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor
from hf_trainweights.tensor.requantizing import requantize


def resize_token_embeddings(
    self: PreTrainedModel,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> nn.Module:
    """Resize the embeddings and the output head of a quantized model; return the input embeddings.

    Quantized ones are float while Transformers draws new rows and copies the old ones; what it refuses leaves them
    unchanged.
    """
    places = parameter_places(self)
    weights = [getattr(module, "weight", None) for module in _tables(self)]
    quantized = {id(weight): weight for weight in weights if isinstance(weight, QuantizedTensor)}
    for key, weight in quantized.items():
        put_parameter(places[key], nn.Parameter(weight.dequantize(), requires_grad=False))
    try:
        result = type(self).resize_token_embeddings(self, new_num_tokens, pad_to_multiple_of, mean_resizing)
    except BaseException:
        for key, weight in quantized.items():
            put_parameter(places[key], weight)  # type: ignore[arg-type]
        raise
    # Transformers may have made a new head. Tied tables come twice, and are quantized the first time.
    resized = parameter_places(self)
    for module, weight in zip(_tables(self), weights, strict=True):
        values = getattr(module, "weight", None)
        if isinstance(weight, QuantizedTensor) and isinstance(values, Tensor) and id(values) not in quantized:
            new: Any = weight if values.shape == weight.shape else as_parameter(requantize(weight, values))
            put_parameter(resized[id(values)], new)
            quantized[id(new)] = new
    return result


def _tables(model: PreTrainedModel) -> list[nn.Module | None]:
    return [model.get_input_embeddings(), model.get_output_embeddings()]
