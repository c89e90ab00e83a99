"""`quantize_`: any nn.Module in place, without Transformers' loading.

`module.state_dict()` keeps the float module's keys; `torch.save` and `torch.load` with their defaults carry it, and
`load_state_dict(..., assign=True)` puts it into a module on the meta device without a full-precision copy. A
Transformers model becomes what `from_pretrained` would have made of it, and saves itself likewise.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from hf_trainweights.models.config import TrainWeightsConfig
from hf_trainweights.models.quantizer import TrainWeightsHfQuantizer
from hf_trainweights.models.selection import Summary, choose
from hf_trainweights.tensor.modules import announce, check_choice, choose_layouts_, model_skips, quantize_chosen


def quantize_(module: nn.Module, config: TrainWeightsConfig) -> Summary:
    """Quantize the weights of a module in place.

    Args:
        module: Any module with its weights loaded. Weights that are quantized already stay as they are.
        config: Which weights, and to which format.

    Returns:
        What was done with each parameter; the same is logged in one line.

    Raises:
        ConfigError: There is nothing to quantize, or the configuration was read from a file and has unknown keys.
        QuantizationError: A weight holds NaN or Inf, or is on the meta device; the module is unchanged.

    Example:
        >>> layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        >>> print(quantize_(layers, TrainWeightsConfig("int4", group_size=32)))
        quantized: 2 int4 g32; left alone: 2 not the weight of a linear, expert or embedding layer; ...
    """
    config.check_quantizing()
    summary = choose(module, config, model_skips(module, config))
    check_choice(module, summary, config)
    quantize_chosen(module, summary)
    choose_layouts_(module)
    quantizer = getattr(module, "hf_quantizer", None) or TrainWeightsHfQuantizer(config, pre_quantized=False)
    if isinstance(module, PreTrainedModel) and isinstance(quantizer, TrainWeightsHfQuantizer):
        return quantizer.adopt(module)
    announce(summary)
    return summary
