"""What importing the package changes in Transformers and torch: they get to know the quantizer and two functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from torch.nn.modules.module import register_module_module_registration_hook
from torch.serialization import add_safe_globals
from transformers.quantizers.auto import register_quantization_config, register_quantizer

from hf_trainweights.models.config import QUANT_METHOD, TrainWeightsConfig
from hf_trainweights.models.host.adapters import meet_adapters
from hf_trainweights.models.host.construction import refuse_quantized_configurations
from hf_trainweights.models.host.spellings import name_the_right_spelling


def register(quantizer: type, callable_by_files: Iterable[Callable[..., Any]]) -> None:
    """Register the quantizer with Transformers, and with torch the functions that files may call.

    A second call changes nothing.

    Args:
        quantizer: The `HfQuantizer` subclass.
        callable_by_files: Functions that `torch.load(weights_only=True)` may call. Files name these by the package
            alone, so that modules may move.
    """
    # Transformers refuses a second registration, as after a reload of the package, with a ValueError.
    with contextlib.suppress(ValueError):
        register_quantization_config(QUANT_METHOD)(TrainWeightsConfig)
        register_quantizer(QUANT_METHOD)(quantizer)
        register_module_module_registration_hook(meet_adapters)  # type: ignore[arg-type]
        name_the_right_spelling()
        refuse_quantized_configurations(QUANT_METHOD)
    for function in callable_by_files:
        function.__module__ = __name__.partition(".")[0]
        add_safe_globals([function])
