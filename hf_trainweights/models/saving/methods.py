"""Methods that a quantized model has of its own beside those that save it.

`train` warns where next to nothing would train. `resize_token_embeddings` keeps the codes of old rows, and quantizes
new rows likewise.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_trainweights.tensor.distributed.placements import local_tensor
from hf_trainweights.tensor.modules import as_parameter, parameter_places, put_parameter
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor
from hf_trainweights.tensor.requantizing import requantize


def train(self: PreTrainedModel, mode: bool = True) -> PreTrainedModel:
    """Set training mode, and warn where nobody has chosen what is to train.

    Transformers' Trainer evaluates a quantized model only if its quantizer lets it train one too. So a model without
    adapters, of which only norms, biases and the like would train, is told here.
    """
    if mode and not self.training and _trains_leftovers(self):
        warnings.warn(
            "The quantized weights of this model stay frozen, and it has no adapters: training changes only its float "
            "parameters, such as norms and biases. Attach adapters, for example with PEFT. If these parameters are "
            "meant, freeze one of them: then what trains is taken for your choice.",
            stacklevel=2,
        )
    return type(self).train(self, mode)


def _trains_leftovers(model: PreTrainedModel) -> bool:
    """Return whether a model is as it was loaded: each parameter that can train would. Adapters freeze the others."""
    parameters = list(model.parameters())
    quantized = [parameter for parameter in parameters if isinstance(local_tensor(parameter), QuantizedTensor)]
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    return bool(quantized and trainable) and len(quantized) + len(trainable) == len(parameters)


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
