"""What `from_pretrained` says where a configuration is a plain string: the right spelling, no AttributeError."""

from __future__ import annotations

import functools
from typing import Any

from transformers.quantizers.auto import AutoHfQuantizer

from hf_trainweights.errors import ConfigError
from hf_trainweights.formats import FORMATS


def name_the_right_spelling() -> None:
    """Let `from_pretrained(quantization_config="int4")` say what to write.

    Transformers asks the configuration for its method before any quantizer is known, and a string has none.
    """
    original: Any = AutoHfQuantizer.from_config

    @functools.wraps(original)
    def from_config(quantization_config: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_a_name(quantization_config)
        return original(quantization_config, *args, **kwargs)

    AutoHfQuantizer.from_config = from_config  # type: ignore[method-assign]


def _refuse_a_name(config: Any) -> None:
    if isinstance(config, str) and config in FORMATS:
        next_step = f'Write quantization_config=TrainWeightsConfig("{config}").'
        raise ConfigError("quantization_config", "a configuration", f"the string {config!r}", next_step)
