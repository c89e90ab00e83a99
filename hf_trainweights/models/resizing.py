"""resize_token_embeddings of a quantized model: as ever where the embeddings are float, else refused as a whole."""

from __future__ import annotations

import math

from torch import nn
from transformers import PreTrainedModel

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor


def resize_token_embeddings(
    self: PreTrainedModel,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> nn.Module:
    """Resize the embeddings and the output head of a quantized model whose own are float.

    Transformers would draw new rows and copy the old ones into them one table after the other; it would stop at the
    first quantized one, with the others resized already.

    Args:
        self: The model.
        new_num_tokens: As for Transformers.
        pad_to_multiple_of: As for Transformers.
        mean_resizing: As for Transformers.

    Returns:
        The input embeddings.

    Raises:
        UnsupportedError: The size changes, and embeddings or head are quantized; the model is unchanged.
    """
    for module in (self.get_input_embeddings(), self.get_output_embeddings()):
        weight = getattr(module, "weight", None)
        if isinstance(weight, QuantizedTensor):
            present = weight.shape[0]
            wanted = present if new_num_tokens is None else new_num_tokens
            multiple = pad_to_multiple_of or 1
            wanted = math.ceil(wanted / multiple) * multiple
            if wanted != present:
                raise UnsupportedError(
                    "resize_token_embeddings",
                    "embeddings and an output head in float",
                    f"a quantized {type(module).__name__} of {present} tokens, to become {wanted}",
                    "Resize the float model first and quantize it then; or call model.dequantize(), resize, and "
                    "hf_trainweights.quantize_(model, config) again.",
                )
    return type(self).resize_token_embeddings(self, new_num_tokens, pad_to_multiple_of, mean_resizing)
