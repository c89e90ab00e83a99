"""`quantize_`: any nn.Module in place, without Transformers' loading.

`module.state_dict()` keeps the float module's keys; `torch.save` and `torch.load` carry it with their defaults, and
`load_state_dict(..., assign=True)` puts it into a module on the meta device without a full-precision copy. A
Transformers model, also one inside another module, becomes the same as one that `from_pretrained` quantized, and saves
itself likewise.
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
from hf_trainweights.models.budget.sensitivity import Batch
from hf_trainweights.models.calibration.batches import digest_of
from hf_trainweights.models.calibration.finished import FinishedBlocks
from hf_trainweights.models.calibration.walk import Calibration, calibrate, require_gain
from hf_trainweights.models.choosing.config import QUANT_METHOD, FormatName, TrainWeightsConfig
from hf_trainweights.models.choosing.description import describe, is_described
from hf_trainweights.models.choosing.selection import check_choice, choose
from hf_trainweights.models.choosing.summary import Choice, Summary, say_if_head_is_large, say_if_slow
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
            tokens in all. The codes of formats of 2 to 6 bits and of `coded` are then chosen so that what the blocks of
            the model return changes least, block by block: minutes for small models, and worth most of a bit. With
            `bits` or `size` the batches also tell which weights matter most. If it is None, a weight alone decides
            about its codes, and for `bits` or `size` random tokens do, where the module is a Transformers model that
            takes tokens alone; else the sizes of the weights.

    Returns:
        The choice for each parameter, and what calibration was worth; it is also logged in one line.

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
    """Quantize the weights of a module as `quantize_` does, which says what is raised.

    `directory` keeps the blocks that calibration has finished, for a call after an interruption, and beside it lie the
    tensors of other weights; with None nothing is kept, and these are in memory.
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
    if config.needs_plan:
        config = allocate(module, config, *measure_in_memory(module, config, batches, spill))
    summary = choose(module, config)
    check_choice(module, summary, config)
    todo = _checked(summary)
    if batches is not None and config.plan is None:
        require_gain(todo)
    found = None
    if batches is not None and sha256 is not None:
        inputs = spill or Spill(Path(tempfile.gettempdir()))
        found = calibrate(module, todo, batches, inputs, FinishedBlocks(directory, sha256))
    _put(module, todo, {} if found is None else found.weights, spill)
    say_if_slow(module, config)
    say_if_head_is_large(summary)
    return _told(_adopted(module, config, found) or summary, found)


def _adopted(module: nn.Module, config: TrainWeightsConfig, found: Calibration | None) -> Summary | None:
    """Make the Transformers models in a module such as `from_pretrained` returns; return the summary of the whole."""
    calibrated = {id(module.get_parameter(name)) for name in (found.weights if found is not None else ())}
    for model in _models(module):
        is_calibrated = not calibrated.isdisjoint(map(id, model.parameters()))
        own = config if is_calibrated else config.but(calibration_sha256=None)
        quantizer = getattr(model, "hf_quantizer", None) or TrainWeightsHfQuantizer(own, pre_quantized=False)
        if isinstance(quantizer, TrainWeightsHfQuantizer):
            if found is not None and is_calibrated:
                # The quantizer may be that of an earlier call, or of a load.
                quantizer.calibrated = found.gain
                known = quantizer.quantization_config.but(calibration_sha256=config.calibration_sha256)
                quantizer.quantization_config = model.config.quantization_config = known
            adopted = quantizer.adopt(model)
            if model is module:
                return adopted
    return None


def _told(summary: Summary, found: Calibration | None) -> Summary:
    """Return a summary with what calibration brought and could not bring, after logging it."""
    if found is not None:
        why = {name: f"without calibration: {reason}" for name, reason in found.reasons.items()}
        told = (replace(each, reason=why[each.name]) if each.name in why else each for each in summary.tensors)
        summary = Summary(tuple(told), found.gain if found.weights else None)
    _logger.info("%s", summary)
    return summary


def adopt(model: nn.Module) -> bool:
    """Make a Transformers model that got quantized weights otherwise the same as one that `from_pretrained` loaded.

    Return whether it was made so: False for one that is so already, or holds no quantized weight.
    """
    if not isinstance(model, PreTrainedModel) or getattr(model, "hf_quantizer", None) is not None:
        return False
    if not any(map(is_quantized, model.parameters())):
        return False
    saved: Any = getattr(model.config, "quantization_config", None)
    config = TrainWeightsConfig.of(saved) if quant_method(model.config) == QUANT_METHOD else None
    if config is None or not is_described(model, config):
        quantizers = (getattr(part, "hf_quantizer", None) for part in model.modules())
        configs = [own.quantization_config for own in quantizers if isinstance(own, TrainWeightsHfQuantizer)]
        config = describe(model, configs)
    # Advice about the speed of its products was due when its parts got their weights.
    with loading_to_write(None):
        quantizer = TrainWeightsHfQuantizer(config, pre_quantized=True)
    quantizer.adopt(model)
    return True


def dequantize_(module: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace the quantized weights of a module by the float weights they stand for, in place.

    Args:
        module: Any module. A model of Transformers or diffusers in it that has no other quantized weights is a float
            model again, which saves itself without this package.
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
    for part in module.modules():
        forget_if_float(part)


def settle(model: PreTrainedModel) -> bool:
    """Let a model say of itself whether it is quantized as its weights are; return whether it now says that it is."""
    forget_if_float(model)
    return adopt(model)


def _models(module: nn.Module) -> Iterator[PreTrainedModel]:
    """Yield the outermost models of Transformers with quantized weights, such as the encoder of a SentenceTransformer.

    An adapter's model yields none, because saving it saves the adapter alone.
    """
    if isinstance(module, PreTrainedModel):
        if any(isinstance(parameter, QuantizedTensor) for parameter in module.parameters()):
            yield module
    elif not hasattr(module, "peft_config"):
        for child in module.children():
            yield from _models(child)


def _checked(summary: Summary) -> list[Choice]:
    """Return the choices whose weights are still to be quantized.

    Every weight is checked before the first is replaced, so that an error leaves a whole float module behind.
    """
    todo = [choice for choice in summary.quantized if not isinstance(local_tensor(choice.weight), QuantizedTensor)]
    for choice in todo:
        check_loaded(choice.name, choice.weight)
        if not _all_finite(choice.weight.detach()):
            next_step = "Repair the checkpoint or leave this tensor out with modules_to_not_convert."
            raise QuantizationError(choice.name, "finite values", "NaN or Inf", next_step)
    return todo


def _put(module: nn.Module, todo: Iterable[Choice], known: Mapping[str, QuantizedTensor], spill: Spill | None) -> None:
    """Replace weights by those that are known already, else by their quantized values."""
    places = parameter_places(module)
    for choice in todo:
        weight = choice.weight
        tensor = known.get(choice.name)
        if tensor is None:
            tensor = keep_in(spill, choice.quantize(weight))
        put_parameter(places[id(weight)], as_parameter(tensor))


def _all_finite(weight: Tensor) -> bool:
    # A sum that is finite has no NaN or Inf in it, and takes a third of the time of the largest magnitude. A sum of
    # finite values may overflow, so the largest magnitude has the last word.
    if weight.numel() == 0 or weight.sum().isfinite():
        return True
    return bool(largest_magnitude(weight.contiguous()).isfinite().all())
