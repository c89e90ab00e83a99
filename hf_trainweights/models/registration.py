"""All that the package changes in Transformers and torch, each with the reason why there is no other way.

- Transformers' registries get the quantizer, and torch's safe globals two functions: both are made for that.
- PyTorch calls a hook when a module gets a parameter; the hook does nothing for a float one. Only PyTorch knows when
  `load_state_dict(assign=True)` or `torch.load` puts a quantized weight into a module. The hook gives the weight its
  memory layout, and the module its description and its refusal of TorchScript, which otherwise saves garbage.
- PyTorch calls a hook when a module gets a module; the hook acts only on layers of PEFT over quantized weights. PEFT
  has no interface for writing to a weight of another class (`host/adapters`).
- `PreTrainedModel._from_config` refuses the configuration of a model that this package quantized. Transformers asks no
  quantizer there, and would make a float model that calls itself quantized (`host/models`).
- `PreTrainedModel.initialize_weights` does not see quantized weights: after a load, a class may write to parts of a
  weight that it has just loaded (`host/models`).
- `PreTrainedConfig.get_config_dict` adds to the configuration of a part, such as the text tower of a quantized CLIP,
  that its weights are quantized. config.json says it once for all parts, and Transformers reads the part alone.
- Methods of `PreTrainedModel` that save, resize, measure or dequantize a model first make it a quantized model if its
  weights are quantized. It may be composed of quantized parts, which no load of Transformers has seen.

The first save of a quantized model replaces `safe_save_file`, by which Transformers writes each shard: there is no
other way in. The replacement calls Transformers' own function except within our saves (`host/checkpoints`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.serialization import add_safe_globals
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer

from hf_trainweights.models.choosing.config import QUANT_METHOD, TrainWeightsConfig
from hf_trainweights.models.host.adapters import meet_adapters
from hf_trainweights.models.host.models import (
    adopt_before,
    hand_down_to_parts,
    hide_from_initialization,
    refuse_quantized_configurations,
)
from hf_trainweights.tensor.modules import describe

# The methods that a quantized model has in place of Transformers' own, and the one that makes it float.
_METHODS = ("save_pretrained", "push_to_hub", "get_memory_footprint", "resize_token_embeddings", "dequantize")


def register(
    quantizer: type, adopt: Callable[[PreTrainedModel], bool], callable_by_files: Iterable[Callable[..., Any]]
) -> None:
    """Register the quantizer with Transformers, and with torch the functions that files may call; once is enough.

    `torch.load(weights_only=True)` calls no function that a file names but those in torch's list of safe globals.

    Args:
        quantizer: The class that Transformers makes for the quantization method of this package.
        adopt: Called with a model before each of `_METHODS`; it makes the model a quantized one if its weights are.
        callable_by_files: The functions that join torch's list.
    """
    # Transformers refuses a second registration, as after a reload of the package, with a ValueError.
    with contextlib.suppress(ValueError):
        register_quantization_config(QUANT_METHOD)(TrainWeightsConfig)
        register_quantizer(QUANT_METHOD)(quantizer)
        register_module_module_registration_hook(meet_adapters)  # type: ignore[arg-type]
        register_module_parameter_registration_hook(describe)  # type: ignore[arg-type]
        refuse_quantized_configurations(QUANT_METHOD)
        hand_down_to_parts(QUANT_METHOD)
        hide_from_initialization()
        adopt_before(_METHODS, adopt)
    for function in callable_by_files:
        # Files name the function by the package alone, so that modules may move.
        function.__module__ = __name__.partition(".")[0]
        add_safe_globals([function])
