"""`from_config` of a quantized model's configuration: an error, because nothing would be quantized."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_trainweights.errors import ConfigError


def refuse_quantized_configurations(method: str) -> None:
    """Let `from_config` refuse the configuration of a quantized model; on the meta device it makes its skeleton.

    Transformers asks no quantizer there. It would make a float model of random weights that says of itself that it is
    quantized, so that nothing could load what it saves.
    """
    original: Any = getattr(PreTrainedModel, "_from_config", None)
    if original is None:
        return

    @functools.wraps(original.__func__)
    def from_config(cls: type[PreTrainedModel], config: Any, **kwargs: Any) -> Any:
        # `from_pretrained` makes models, and the models within them, on the meta device; `init_empty_weights` of
        # accelerate puts parameters there, and leaves the default device as it is.
        if quant_method(config) == method and not nn.LayerNorm(1).weight.is_meta:
            raise ConfigError(
                f"{cls.__name__}.from_config",
                "the configuration of a float model: its weights are random, and no quantizer is asked",
                f"one of a model that {method} has quantized",
                "Load the model with from_pretrained; for random weights, delete config.quantization_config first, and "
                "call quantize_ on the model.",
            )
        return original.__func__(cls, config, **kwargs)

    PreTrainedModel._from_config = classmethod(from_config)  # type: ignore[method-assign]


def quant_method(config: Any) -> object:
    """Return the name of the method that a model's configuration says it is quantized by; None for a float model."""
    described = getattr(config, "quantization_config", None)
    return described.get("quant_method") if isinstance(described, dict) else getattr(described, "quant_method", None)
