"""Training mode of a quantized model: a warning where next to nothing of it would train."""

from __future__ import annotations

import warnings

from transformers import PreTrainedModel

from hf_trainweights.tensor.distributed.placements import local_tensor
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor


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
