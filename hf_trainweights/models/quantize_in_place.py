"""`quantize_`: any nn.Module in place, without Transformers' loading.

`module.state_dict()` keeps the float module's keys. `torch.save` and `torch.load` carry it with their defaults, and
`load_state_dict(..., assign=True)` puts it into a module on the meta device without a full-precision copy. A model of
Transformers, also one inside another module, becomes the same as one that `from_pretrained` quantized, and saves itself
in the same way.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_trainweights.errors import ConfigError, QuantizationError
from hf_trainweights.files.spill import Spill
from hf_trainweights.formats.arithmetic import largest_magnitude
from hf_trainweights.models.budget.allocation import allocate, check_loaded
from hf_trainweights.models.budget.measure import measure_in_memory
from hf_trainweights.models.calibration.batches import digest_of
from hf_trainweights.models.calibration.finished import FinishedBlocks
from hf_trainweights.models.calibration.walk import Calibration, calibrate, require_gain
from hf_trainweights.models.choosing.advice import say_if_head_is_large, say_if_slow
from hf_trainweights.models.choosing.config import QUANT_METHOD, FormatName, TrainWeightsConfig
from hf_trainweights.models.choosing.description import describe, is_described
from hf_trainweights.models.choosing.selection import check_choice, choose
from hf_trainweights.models.choosing.summary import Choice, Summary
from hf_trainweights.models.host.inputs import Batch
from hf_trainweights.models.host.models import quant_method
from hf_trainweights.models.loading.conversion import keep_in, loading_to_write
from hf_trainweights.models.quantizer import TrainWeightsHfQuantizer
from hf_trainweights.models.saving.saving import forget_if_float
from hf_trainweights.tensor.distributed.placements import local_tensor
from hf_trainweights.tensor.modules import (
    as_parameter,
    dequantize_weights,
    is_quantized,
    parameter_places,
    put_parameter,
)
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

_logger = logging.getLogger(__name__)


def quantize_(
    module: nn.Module,
    config: TrainWeightsConfig | FormatName | Mapping[str, Any],
    *,
    calibration: Iterable[Batch] | None = None,
) -> Summary:
    """Quantize the weights of a module in place.

    Args:
        module: Any module with its weights loaded. Weights that are in their format already stay as they are.
        config: Which weights to quantize, and to which format; the format's name alone for all weights.
        calibration: Batches such as the model will get, each a dict of its arguments or one tensor, some thousand
            tokens in all. The codes of formats of 2 to 6 bits and of `coded` are then chosen block by block, so that
            the outputs of each block change least. This takes minutes for small models, and is worth most of a bit. For
            `bits` or `size` the batches also tell which weights matter most. If it is None, the codes of a weight
            depend on the weight alone. For `bits` or `size`, random tokens then tell which weights matter if the module
            is a Transformers model that takes tokens alone, else the sizes of the weights.

    Returns:
        The choice for each parameter, and the gain of calibration; it is also logged in one line.

    Raises:
        ConfigError: There is nothing to quantize, a weight is quantized to another format already, a selector selects
            nothing, or the configuration is not valid or has unknown keys, or the module does not run on
            `calibration`, or no format gains by it; the module is unchanged.
        QuantizationError: A weight holds NaN or Inf, is on the meta device, or is sharded, or a lazy layer has none
            yet; the module is unchanged.

    Examples:
        >>> layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        >>> print(quantize_(layers, TrainWeightsConfig("int4", group_size=32)))
        quantized: 2 int4 g32; left alone: 2 not the weight of a linear, expert or embedding layer; ...
    """
    return quantize_module(module, config, calibration, None)


def quantize_module(
    module: nn.Module,
    config: TrainWeightsConfig | FormatName | Mapping[str, Any],
    calibration: Iterable[Batch] | None,
    directory: Path | None,
) -> Summary:
    """Quantize the weights of a module as `quantize_` does; the errors are the same.

    `directory` keeps the blocks that calibration has finished, for a call after an interruption, and the tensors of
    other weights lie in files beside it. If it is None, no block is kept, and all tensors are in memory.
    """
    if not isinstance(module, nn.Module):
        next_step = "Load it first, for example with from_pretrained."
        raise ConfigError("module", "an nn.Module", repr(module)[:80], next_step)
    config = TrainWeightsConfig.of(config)
    config.check_quantizing()
    batches = None if calibration is None else list(calibration)
    if batches == []:
        raise ConfigError("calibration", "batches", "none", "An iterator may have been read already.")
    sha256 = None if batches is None else digest_of(batches)
    config = config.but(calibration_sha256=sha256)
    spill = None if directory is None else Spill(directory)
    choices = choose(module, config)
    if config.needs_plan:
        choices = allocate(choices, *measure_in_memory(choices, batches, spill))
    check_choice(choices)
    config, summary = choices.config, choices.summary
    todo = _checked(summary)
    if batches is not None and config.plan is None:
        require_gain(todo)
    calibrated = None
    if batches is not None and sha256 is not None:
        inputs = spill or Spill(Path(tempfile.gettempdir()))
        calibrated = calibrate(module, todo, batches, inputs, FinishedBlocks(directory, sha256))
    _put(module, todo, {} if calibrated is None else calibrated.weights, spill)
    say_if_slow(module, config)
    say_if_head_is_large(summary)
    return _reported(_adopted(module, config, calibrated) or summary, calibrated)


def _adopted(module: nn.Module, config: TrainWeightsConfig, calibrated: Calibration | None) -> Summary | None:
    """Make models in a module like those that `from_pretrained` returns; return the summary if one is `module`."""
    ids = {id(module.get_parameter(name)) for name in (calibrated.weights if calibrated is not None else ())}
    for model in _models(module):
        is_calibrated = not ids.isdisjoint(map(id, model.parameters()))
        own = config if is_calibrated else config.but(calibration_sha256=None)
        quantizer = getattr(model, "hf_quantizer", None) or TrainWeightsHfQuantizer(own, pre_quantized=False)
        if isinstance(quantizer, TrainWeightsHfQuantizer):
            if calibrated is not None and is_calibrated:
                # The quantizer may come from an earlier call, or from a load.
                quantizer.calibrated = calibrated.gain
                own = quantizer.quantization_config.but(calibration_sha256=config.calibration_sha256)
                quantizer.quantization_config = model.config.quantization_config = own
            adopted = quantizer.adopt(model)
            if model is module:
                return adopted
    return None


def _reported(summary: Summary, calibrated: Calibration | None) -> Summary:
    """Log a summary and return it, with the gain of calibration and the reasons for weights that are not calibrated."""
    if calibrated is not None:
        why = {name: f"without calibration: {reason}" for name, reason in calibrated.reasons.items()}
        choices = [replace(item, reason=why[item.name]) if item.name in why else item for item in summary.tensors]
        summary = Summary(tuple(choices), calibrated.gain if calibrated.weights else None)
    _logger.info("%s", summary)
    return summary


def adopt(model: nn.Module) -> bool:
    """Make a Transformers model that got quantized weights in another way like one that `from_pretrained` loaded.

    Return False if it has a quantizer already, or no quantized weight.
    """
    if not isinstance(model, PreTrainedModel) or getattr(model, "hf_quantizer", None) is not None:
        return False
    if not any(map(is_quantized, model.parameters())):
        return False
    saved: Any = getattr(model.config, "quantization_config", None)
    config = TrainWeightsConfig.of(saved) if quant_method(model.config) == QUANT_METHOD else None
    if config is None or not is_described(model, config):
        quantizers = (getattr(inner, "hf_quantizer", None) for inner in model.modules())
        configs = [own.quantization_config for own in quantizers if isinstance(own, TrainWeightsHfQuantizer)]
        config = describe(model, configs)
    # `loading_to_write` drops advice about speed: it was due when the parts of the model got their weights.
    with loading_to_write(None):
        quantizer = TrainWeightsHfQuantizer(config, pre_quantized=True)
    quantizer.adopt(model)
    return True


def dequantize_(module: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace the quantized weights of a module by the float weights they stand for, in place.

    Args:
        module: Any module. A model of Transformers or diffusers, also one in it, becomes a float model again, which
            saves itself without this package.
        dtype: Dtype of the float weights; each weight's own if None.

    Raises:
        CorruptFileError: A stored tensor does not fit its format.

    Examples:
        >>> from hf_trainweights import TrainWeightsConfig, quantize_
        >>> layer = nn.Linear(64, 64)
        >>> _ = quantize_(layer, TrainWeightsConfig("int8"))
        >>> dequantize_(layer)
        >>> type(layer.weight).__name__
        'Parameter'
    """
    dequantize_weights(module, dtype)
    for inner in module.modules():
        forget_if_float(inner)


def settle(model: PreTrainedModel) -> bool:
    """Make a model a quantized or a float model for Transformers, whichever its weights are.

    Weights may have been exchanged since the load. Return True if the model was made a quantized one.
    """
    forget_if_float(model)
    return adopt(model)


def _models(module: nn.Module) -> Iterator[PreTrainedModel]:
    """Yield the outermost models of Transformers with quantized weights, such as the encoder of a SentenceTransformer.

    The base model in a model of PEFT is left out, because a save of that saves the adapter alone.
    """
    if isinstance(module, PreTrainedModel):
        if any(isinstance(parameter, QuantizedTensor) for parameter in module.parameters()):
            yield module
    elif not hasattr(module, "peft_config"):
        for child in module.children():
            yield from _models(child)


def _checked(summary: Summary) -> list[Choice]:
    """Return the choices whose weights are still to be quantized.

    Every weight is checked before the first is replaced, so that after an error the module is all float as before.
    """
    todo = [choice for choice in summary.quantized if not isinstance(local_tensor(choice.weight), QuantizedTensor)]
    for choice in todo:
        check_loaded(choice.name, choice.weight)
        if not _all_finite(choice.weight.detach()):
            next_step = "Repair the checkpoint or leave this tensor out with modules_to_not_convert."
            raise QuantizationError(choice.name, "finite values", "NaN or Inf", next_step)
    return todo


def _put(module: nn.Module, todo: Iterable[Choice], made: Mapping[str, QuantizedTensor], spill: Spill | None) -> None:
    """Replace weights by quantized ones: those that are made already, else new ones."""
    places = parameter_places(module)
    for choice in todo:
        weight = choice.weight
        tensor = made.get(choice.name)
        if tensor is None:
            tensor = keep_in(spill, choice.quantize(weight))
        put_parameter(places[id(weight)], as_parameter(tensor))


def _all_finite(weight: Tensor) -> bool:
    # If the sum is finite, no value is NaN or Inf. The sum takes a third of the time of the largest magnitude. But a
    # sum of finite values may overflow, so the largest magnitude has the last word.
    if weight.numel() == 0 or weight.sum().isfinite():
        return True
    return bool(largest_magnitude(weight.contiguous()).isfinite().all())
